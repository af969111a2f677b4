// Stands between Claude Code and a cell, and directs what the model does: a random model takes no decisions.
//
// For each step of a script, a tool must be called, and the tool's schema has room for one input only; after the last
// step an answer is asked for. Neither is in the prompt, whose template lists the names of tools alone. All else is
// passed on as it is.

import { createServer } from 'node:http';

export const LAST_WORDS = 'All done.';

/**
 * Starts a director.
 *
 * `script` is a list of tools' names and their inputs. Returns its `url`, `turns` (for each answer: whether tools were
 * offered, its blocks, why it stopped, and its usage), and `close`.
 */
export async function direct(cell, script) {
  const turns = [];
  const server = createServer(async (request, response) => {
    const chunks = await Array.fromAsync(request);
    const body = chunks.length ? directed(JSON.parse(Buffer.concat(chunks)), script) : undefined;
    const headers = { 'content-type': 'application/json', 'anthropic-version': request.headers['anthropic-version'] };
    const answer = await fetch(cell.url + request.url, {
      method: request.method,
      headers,
      body: body && JSON.stringify(body),
    });
    const text = await answer.text();
    if (request.url.startsWith('/v1/messages?') && answer.ok) {
      turns.push(turnOf(body, text));
    }
    response.writeHead(answer.status, { 'content-type': answer.headers.get('content-type') ?? 'text/plain' });
    response.end(text);
  });
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  return { url: `http://127.0.0.1:${server.address().port}`, turns, close: () => server.close() };
}

function directed(body, script) {
  if (!body.tools?.length) {
    return body;
  }
  const last = body.messages.findLastIndex((message) => message.role === 'user' && !isResult(message));
  const step = script[body.messages.slice(last).flatMap(resultsOf).length];
  if (step === undefined) {
    const format = { type: 'json_schema', schema: { const: LAST_WORDS } };
    return { ...body, tool_choice: { type: 'none' }, output_config: { ...body.output_config, format } };
  }
  const [name, input] = step;
  const tools = body.tools.map((tool) => (tool.name === name ? { ...tool, input_schema: only(input) } : tool));
  return { ...body, tools, tool_choice: { type: 'tool', name, disable_parallel_tool_use: true } };
}

function isResult(message) {
  return resultsOf(message).length > 0;
}

function resultsOf(message) {
  return Array.isArray(message.content) ? message.content.filter((part) => part.type === 'tool_result') : [];
}

function only(input) {
  const properties = Object.fromEntries(Object.entries(input).map(([name, value]) => [name, { const: value }]));
  return { type: 'object', properties, required: Object.keys(input), additionalProperties: false };
}

function turnOf(body, text) {
  const events = text
    .split('\n\n')
    .filter((block) => block.startsWith('event: '))
    .map((block) => JSON.parse(block.slice(block.indexOf('data: ') + 'data: '.length)));
  const end = events.find((event) => event.type === 'message_delta');
  return {
    offersTools: Boolean(body.tools?.length) && body.tool_choice.type !== 'none',
    blocks: events.filter((event) => event.type === 'content_block_start').map((event) => event.content_block.type),
    stopReason: end?.delta.stop_reason,
    usage: end?.usage,
  };
}
