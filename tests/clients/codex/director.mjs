// Directs what the model does for Codex; see `directing.mjs`. A function's input is held by its schema, a custom tool's by
// a regular expression.

import { LAST_WORDS, eventsOf, only, passOn } from '../directing.mjs';

/**
 * Starts a director.
 *
 * `script` is a list of tools' names and their inputs: objects for functions, texts for custom tools. Returns its `url`,
 * `turns` (for each answer: the types of the tools that were offered, what the header `x-lockstep-ignored` says, and the
 * events), and `close`.
 */
export async function direct(cell, script) {
  const turns = [];
  const note = ({ asked, answer, text }) => {
    if (asked) {
      const types = (asked.tools ?? []).map((tool) => tool.type);
      turns.push({ types, ignored: answer.headers.get('x-lockstep-ignored') ?? '', events: eventsOf(text) });
    }
  };
  return { turns, ...(await passOn(cell, { directed: (body) => directed(body, script, cell.model), note })) };
}

function directed(body, script, model) {
  const last = body.input.findLastIndex((item) => item.type === 'message' && item.role === 'user');
  const step = script[body.input.slice(last).filter((item) => item.type.endsWith('call_output')).length];
  if (step === undefined) {
    const format = { type: 'json_schema', name: 'words', schema: { const: LAST_WORDS } };
    return { ...body, model, tool_choice: 'none', text: { ...body.text, format } };
  }
  const [name, input] = step;
  const tools = body.tools.map((tool) => (tool.name === name ? { ...tool, ...limited(tool.type, input) } : tool));
  const { type } = body.tools.find((tool) => tool.name === name);
  return { ...body, model, tools, tool_choice: { type, name }, parallel_tool_calls: false };
}

function limited(type, input) {
  if (type === 'custom') {
    return { format: { type: 'grammar', syntax: 'regex', definition: input.replace(/[.*+?^${}()|[\]\\\/]/g, '\\$&') } };
  }
  return { parameters: only(input) };
}
