// Chats with OpenAI's library for Node.

import assert from 'node:assert/strict';

import { LengthFinishReasonError } from 'openai/core/error';
import { zodResponseFormat } from 'openai/helpers/zod';
import { z } from 'zod';

import { QUESTION, collect, connect, say, textOf } from './asking.mjs';

const Weather = z.object({
  city: z.enum(['Paris', 'Rome']),
  sunny: z.boolean(),
  degrees: z.union([z.literal(10), z.literal(20)]),
});

// Answer the question, greedily unless the options say otherwise.
function ask(cell, options = {}) {
  return connect(cell).chat.completions.create({
    model: cell.model,
    messages: say(QUESTION),
    temperature: 0,
    max_completion_tokens: 24,
    ...options,
  });
}

// A chat is answered by the model that was asked, with its usage.
export async function check_chat(cell) {
  const answer = await ask(cell);
  const [choice] = answer.choices;
  assert.equal(choice.message.role, 'assistant');
  assert.match(choice.message.content, /Paris/);
  assert.equal(choice.finish_reason, 'stop');
  assert.equal(answer.object, 'chat.completion');
  assert.equal(answer.model, cell.model);
  assert.equal(answer.id, `chatcmpl-${answer._request_id}`);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
}

// A stream has the role first, the finish once, the usage last, and the text of the whole answer.
export async function check_stream(cell) {
  const whole = await ask(cell);
  const pieces = await collect(await ask(cell, { stream: true, stream_options: { include_usage: true } }));
  assert.equal(new Set(pieces.map(({ id, created, model }) => `${id} ${created} ${model}`)).size, 1);
  const last = pieces.pop();
  assert.deepEqual(pieces[0].choices[0].delta, { role: 'assistant', content: '' });
  assert.ok(pieces.slice(1).every((piece) => piece.choices[0].delta.role === undefined));
  const finishes = pieces.map((piece) => piece.choices[0].finish_reason);
  assert.deepEqual(finishes, [...Array(pieces.length - 1).fill(null), 'stop']);
  assert.equal(textOf(pieces), whole.choices[0].message.content);
  assert.ok(pieces.every((piece) => piece.usage === null));
  assert.deepEqual(last.choices, []);
  assert.equal(last.usage.completion_tokens, whole.usage.completion_tokens);
}

// The library's own helper assembles the whole answer from a stream.
export async function check_stream_helper(cell) {
  const whole = await ask(cell, { logprobs: true });
  const stream = connect(cell).chat.completions.stream({
    model: cell.model,
    messages: say(QUESTION),
    temperature: 0,
    max_completion_tokens: 24,
    logprobs: true,
  });
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
  assert.equal(final.choices[0].finish_reason, 'stop');
  assert.deepEqual(
    final.choices[0].logprobs.content.map((entry) => entry.token),
    whole.choices[0].logprobs.content.map((entry) => entry.token),
  );
}

// Several choices of one seed are the same again, streamed.
export async function check_choices(cell) {
  const options = { n: 3, temperature: 1, seed: 7, max_completion_tokens: 8 };
  const texts = (await ask(cell, options)).choices.map((choice) => choice.message.content);
  assert.ok(new Set(texts).size > 1);
  const streamed = ['', '', ''];
  for await (const piece of await ask(cell, { ...options, stream: true })) {
    for (const choice of piece.choices) {
      streamed[choice.index] += choice.delta.content ?? '';
    }
  }
  assert.deepEqual(streamed, texts);
}

// The seed that an answer tells, read as a number of JavaScript, brings the answer again.
export async function check_drawn_seed(cell) {
  const options = { temperature: 1, max_completion_tokens: 8 };
  const first = await ask(cell, options);
  const { seed } = first.lockstep;
  assert.ok(Number.isSafeInteger(seed));
  const again = await ask(cell, { ...options, seed });
  assert.equal(again.choices[0].message.content, first.choices[0].message.content);
}

// A stop string ends the text before it, whole and streamed.
export async function check_stop(cell) {
  const whole = (await ask(cell)).choices[0].message.content;
  const [before] = whole.split(' Paris');
  assert.notEqual(before, whole);
  assert.equal((await ask(cell, { stop: [' Paris'] })).choices[0].message.content, before);
  assert.equal(textOf(await collect(await ask(cell, { stop: ' Paris', stream: true }))), before);
}

// Each token has its log-probability, its bytes, and the likeliest ones in order.
export async function check_logprobs(cell) {
  const answer = await ask(cell, { logprobs: true, top_logprobs: 3 });
  const entries = answer.choices[0].logprobs.content;
  assert.equal(entries.length, answer.usage.completion_tokens);
  const text = Buffer.from(entries.flatMap((entry) => entry.bytes)).toString();
  assert.equal(text.replace('<|im_end|>', ''), answer.choices[0].message.content);
  for (const { logprob, top_logprobs: top } of entries) {
    assert.equal(top.length, 3);
    assert.ok(top[0].logprob >= top[1].logprob && top[1].logprob >= top[2].logprob);
    assert.equal(logprob, top[0].logprob);
  }
}

// An answer in the form of a zod schema is parsed, whole and streamed; one that is cut off raises the library's error.
export async function check_parse(cell) {
  const request = {
    model: cell.model,
    messages: say('The weather?'),
    temperature: 0,
    response_format: zodResponseFormat(Weather, 'weather'),
  };
  const { completions } = connect(cell).chat;
  const { parsed } = (await completions.parse(request)).choices[0].message;
  Weather.parse(parsed);
  const streamed = await completions.stream(request).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.parsed, parsed);
  await assert.rejects(() => completions.parse({ ...request, max_completion_tokens: 2 }), LengthFinishReasonError);
}

// A JSON schema that is written by hand is held.
export async function check_json_schema(cell) {
  const schema = { type: 'object', properties: { a: { enum: [1, 2] } }, required: ['a'], additionalProperties: false };
  const answer = await ask(cell, {
    response_format: { type: 'json_schema', json_schema: { name: 'a', schema, strict: true } },
  });
  assert.ok([1, 2].includes(JSON.parse(answer.choices[0].message.content).a));
}

// Fields without effect are named in a header.
export async function check_ignored_fields(cell) {
  const { response } = await ask(cell, { store: true, user: 'me', max_completion_tokens: 1 }).withResponse();
  assert.deepEqual(response.headers.get('x-lockstep-ignored').split(', ').sort(), ['store', 'user']);
}

// The model is listed, and described by its name.
export async function check_models(cell) {
  const client = connect(cell);
  const models = await collect(client.models.list());
  assert.deepEqual(models.map((model) => model.id), [cell.model, cell.other_name]);
  assert.equal((await client.models.retrieve(cell.model)).max_model_len, 8192);
}
