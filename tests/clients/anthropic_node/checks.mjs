// Anthropic's library for Node.

import assert from 'node:assert/strict';

import Anthropic from '@anthropic-ai/sdk';

const WEATHER = {
  name: 'get_weather',
  input_schema: {
    type: 'object',
    properties: { city: { type: 'string', maxLength: 20 } },
    required: ['city'],
    additionalProperties: false,
  },
};

const connect = (cell) => new Anthropic({ baseURL: cell.url, apiKey: 'none', maxRetries: 0 });

const request = (cell, fields) => ({
  model: cell.model,
  max_tokens: 24,
  temperature: 0,
  messages: [{ role: 'user', content: 'What is the capital of France?' }],
  ...fields,
});

/** The library's stream ends with the message that is answered whole. */
export async function check_streams(cell) {
  const whole = await connect(cell).messages.create(request(cell));
  const texts = [];
  const stream = connect(cell).messages.stream(request(cell)).on('text', (text) => texts.push(text));
  const final = await stream.finalMessage();
  assert.ok(texts.length > 1);
  assert.equal(texts.join(''), whole.content[0].text);
  assert.deepEqual([final.content, final.stop_reason], [whole.content, whole.stop_reason]);
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
}

/** A call goes back with its result, and a text follows; streamed calls are the same. */
export async function check_tools(cell) {
  const body = request(cell, { tools: [WEATHER], tool_choice: { type: 'any' }, max_tokens: 60 });
  const message = await connect(cell).messages.create(body);
  const calls = message.content.filter((block) => block.type === 'tool_use');
  assert.equal(message.stop_reason, 'tool_use');
  const streamed = await connect(cell).messages.stream(body).finalMessage();
  const inputs = (blocks) => blocks.filter((block) => block.type === 'tool_use').map((block) => block.input);
  assert.deepEqual(inputs(streamed.content), inputs(calls));
  const results = calls.map((call) => ({ type: 'tool_result', tool_use_id: call.id, content: 'Sunny' }));
  const messages = [
    ...body.messages,
    { role: 'assistant', content: message.content },
    { role: 'user', content: results },
  ];
  const answer = await connect(cell).messages.create({ ...body, messages, tool_choice: { type: 'none' } });
  assert.equal(answer.content[0].type, 'text');
}

/** Errors are the library's. */
export async function check_errors(cell) {
  await assert.rejects(connect(cell).messages.create(request(cell, { temperature: -1 })), Anthropic.BadRequestError);
  const missing = connect(cell).messages.create(request(cell, { model: 'none-such', stream: true }));
  await assert.rejects(missing, (error) => {
    assert.ok(error instanceof Anthropic.NotFoundError);
    assert.equal(error.requestID, error.error.request_id);
    return true;
  });
}

/** A prompt's tokens are those of its usage. */
export async function check_counted_tokens(cell) {
  const { model, messages } = request(cell);
  const { input_tokens: counted } = await connect(cell).messages.countTokens({ model, messages });
  const { usage } = await connect(cell).messages.create(request(cell));
  assert.equal(usage.input_tokens + usage.cache_read_input_tokens, counted);
}
