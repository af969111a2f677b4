// Stands between Codex and a cell, and directs what the model does: a random model takes no decisions.
//
// For each step of a script, a tool must be called, and there is room for one input only: by a function's schema, or by
// a custom tool's regular expression. After the last step an answer is asked for. None of this is in the prompt, whose
// template lists the names of tools alone. All else is passed on as it is.

import { createServer } from 'node:http';

export const LAST_WORDS = 'All done.';

/**
 * Starts a director.
 *
 * `script` is a list of tools' names and their inputs: objects for functions, texts for custom tools. Returns its `url`,
 * `turns` (for each answer: the types of the tools that were offered, what the header `x-lockstep-ignored` says, and the
 * events), and `close`.
 */
export async function direct(cell, script) {
  const turns = [];
  const server = createServer(async (request, response) => {
    const chunks = await Array.fromAsync(request);
    const asked = chunks.length ? JSON.parse(Buffer.concat(chunks)) : undefined;
    const answer = await fetch(cell.url + request.url, {
      method: request.method,
      headers: { 'content-type': 'application/json' },
      body: asked && JSON.stringify(directed(asked, script, cell.model)),
    });
    const text = await answer.text();
    if (asked) {
      const types = (asked.tools ?? []).map((tool) => tool.type);
      turns.push({ types, ignored: answer.headers.get('x-lockstep-ignored') ?? '', events: eventsOf(text) });
    }
    response.writeHead(answer.status, { 'content-type': answer.headers.get('content-type') ?? 'text/plain' });
    response.end(text);
  });
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  return { url: `http://127.0.0.1:${server.address().port}`, turns, close: () => server.close() };
}

function directed(body, script, model) {
  const last = body.input.findLastIndex((item) => item.type === 'message' && item.role === 'user');
  const step = script[body.input.slice(last).filter((item) => item.type.endsWith('call_output')).length];
  if (step === undefined) {
    const format = { type: 'json_schema', name: 'words', schema: { const: LAST_WORDS } };
    return { ...body, model, tool_choice: 'none', text: { ...body.text, format } };
  }
  const [name, input] = step;
  const tools = body.tools.map((tool) => (tool.name === name ? { ...tool, ...only(tool.type, input) } : tool));
  const { type } = body.tools.find((tool) => tool.name === name);
  return { ...body, model, tools, tool_choice: { type, name }, parallel_tool_calls: false };
}

function only(type, input) {
  if (type === 'custom') {
    return { format: { type: 'grammar', syntax: 'regex', definition: input.replace(/[.*+?^${}()|[\]\\\/]/g, '\\$&') } };
  }
  const properties = Object.fromEntries(Object.entries(input).map(([name, value]) => [name, { const: value }]));
  return { parameters: { type: 'object', properties, required: Object.keys(input), additionalProperties: false } };
}

function eventsOf(text) {
  return text
    .split('\n\n')
    .filter((block) => block.startsWith('event: '))
    .map((block) => JSON.parse(block.slice(block.indexOf('data: ') + 'data: '.length)));
}
