// What the directors of agents share. A director stands between an agent and a cell, and directs what the model does: a
// random model takes no decisions.
//
// For each step of a script, a tool must be called, and there is room for one input only; after the last step an answer
// is asked for. None of this is in the prompt, whose template lists the names of tools alone.

import { createServer } from 'node:http';

export const LAST_WORDS = 'All done.';

/**
 * Starts a server that passes requests on to a cell.
 *
 * `directed` returns what the cell is asked instead of a body; `note` is told each request, with what the agent and the
 * cell were asked (undefined without a body), the cell's answer, and the answer's text. `headers` are the names of the
 * agent's headers that are passed on. Returns its `url` and `close`.
 */
export async function passOn(cell, { directed, note, headers = [] }) {
  const server = createServer(async (request, response) => {
    const chunks = await Array.fromAsync(request);
    const asked = chunks.length ? JSON.parse(Buffer.concat(chunks)) : undefined;
    const body = asked && directed(asked);
    const given = Object.fromEntries(headers.map((name) => [name, request.headers[name]]));
    const answer = await fetch(cell.url + request.url, {
      method: request.method,
      headers: { 'content-type': 'application/json', ...given },
      body: body && JSON.stringify(body),
    });
    const text = await answer.text();
    note({ url: request.url, asked, body, answer, text });
    response.writeHead(answer.status, { 'content-type': answer.headers.get('content-type') ?? 'text/plain' });
    response.end(text);
  });
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  return { url: `http://127.0.0.1:${server.address().port}`, close: () => server.close() };
}

/** A schema that has room for one input. */
export function only(input) {
  const properties = Object.fromEntries(Object.entries(input).map(([name, value]) => [name, { const: value }]));
  return { type: 'object', properties, required: Object.keys(input), additionalProperties: false };
}

/** The data of a stream's events. */
export function eventsOf(text) {
  return text
    .split('\n\n')
    .filter((block) => block.startsWith('event: '))
    .map((block) => JSON.parse(block.slice(block.indexOf('data: ') + 'data: '.length)));
}
