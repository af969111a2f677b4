// Directs what the model does for Claude Code; see `directing.mjs`. A tool's input is held by its schema.

import { LAST_WORDS, eventsOf, only, passOn } from '../directing.mjs';

/**
 * Starts a director.
 *
 * `script` is a list of tools' names and their inputs. Returns its `url`, `turns` (for each answer: whether tools were
 * offered, its blocks, why it stopped, and its usage), and `close`.
 */
export async function direct(cell, script) {
  const turns = [];
  const note = ({ url, body, answer, text }) => {
    if (url.startsWith('/v1/messages?') && answer.ok) {
      turns.push(turnOf(body, text));
    }
  };
  const headers = ['anthropic-version'];
  return { turns, ...(await passOn(cell, { directed: (body) => directed(body, script), note, headers })) };
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

function turnOf(body, text) {
  const events = eventsOf(text);
  const end = events.find((event) => event.type === 'message_delta');
  return {
    offersTools: Boolean(body.tools?.length) && body.tool_choice.type !== 'none',
    blocks: events.filter((event) => event.type === 'content_block_start').map((event) => event.content_block.type),
    stopReason: end?.delta.stop_reason,
    usage: end?.usage,
  };
}
