// Completions with OpenAI's library for Node.

import assert from 'node:assert/strict';

import { collect, connect, textOf } from './asking.mjs';

const PROMPT = 'The capital of France is';

// Continue the prompt, greedily unless the options say otherwise.
function complete(cell, options = {}) {
  return connect(cell).completions.create({
    model: cell.model,
    prompt: PROMPT,
    temperature: 0,
    max_tokens: 8,
    ...options,
  });
}

async function tokenIds(cell, prompt) {
  return (await connect(cell).post(`${cell.url}/tokenize`, { body: { prompt } })).tokens;
}

// A text is continued, whole and streamed.
export async function check_completion(cell) {
  const whole = await complete(cell);
  assert.match(whole.choices[0].text, /Paris/);
  assert.equal(whole.object, 'text_completion');
  assert.equal(whole.choices[0].finish_reason, 'length');
  const pieces = await collect(await complete(cell, { stream: true, stream_options: { include_usage: true } }));
  assert.equal(pieces.pop().usage.completion_tokens, 8);
  assert.equal(textOf(pieces), whole.choices[0].text);
}

// Texts, token ids, and lists of either are continued in order.
export async function check_prompts(cell) {
  const other = 'Once upon a';
  const [first, second] = (await complete(cell, { prompt: [PROMPT, other] })).choices.map((choice) => choice.text);
  const ids = [await tokenIds(cell, PROMPT), await tokenIds(cell, other)];
  assert.equal((await complete(cell)).choices[0].text, first);
  assert.equal((await complete(cell, { prompt: ids[0] })).choices[0].text, first);
  const answer = await complete(cell, { prompt: ids, n: 2 });
  assert.deepEqual(answer.choices.map((choice) => choice.text), [first, first, second, second]);
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2, 3]);
}

// A text is scored without a token being generated.
export async function check_log_likelihood(cell) {
  const answer = await complete(cell, { echo: true, logprobs: 1, max_tokens: 0 });
  const [{ text, logprobs }] = answer.choices;
  assert.equal(text, PROMPT);
  assert.equal(logprobs.tokens.join(''), PROMPT);
  assert.equal(logprobs.token_logprobs[0], null);
  assert.ok(logprobs.token_logprobs.slice(1).every((value) => value < 0));
  assert.equal(answer.usage.completion_tokens, 0);
}
