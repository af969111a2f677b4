// What an application built on Vercel's AI SDK does, through `@ai-sdk/openai-compatible`.

import assert from 'node:assert/strict';

import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const QUESTION = 'What is the capital of France?';
const WEATHER = 'What is the weather in Paris?';
const GREEDY = { temperature: 0, maxOutputTokens: 24, maxRetries: 0 };

function connect(cell) {
  return createOpenAICompatible({
    name: 'lockstep',
    baseURL: cell.base_url,
    apiKey: 'none',
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
}

function greedy(cell) {
  return { ...GREEDY, model: connect(cell)(cell.model) };
}

function weather(cities) {
  return tool({
    description: 'The weather in a city.',
    inputSchema: z.object({ city: z.string().min(1).max(16) }).strict(),
    execute: async ({ city }) => {
      cities.push(city);
      return { city, degrees: 21 };
    },
  });
}

function checkUsage(usage) {
  assert.ok(usage.inputTokens > 0);
  assert.ok(usage.outputTokens > 0);
  assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
}

async function errorOf(promise) {
  const value = await promise.catch((error) => error);
  assert.ok(value instanceof Error, 'nothing was thrown');
  return value;
}

async function callError(promise) {
  const error = await errorOf(promise);
  assert.ok(APICallError.isInstance(error), String(error));
  return error;
}

async function untilRunning(cell, num) {
  const line = new RegExp(`^lockstep_cell_num_requests_running ${num}\\.0$`, 'm');
  while (!line.test(await (await fetch(`${cell.url}/metrics`)).text())) {
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

export async function check_chat(cell) {
  const answer = await generateText({ ...greedy(cell), system: 'You are helpful.', prompt: QUESTION });
  assert.match(answer.text, /Paris/);
  assert.equal(answer.response.modelId, cell.model);
  assert.match(answer.response.id, /^chatcmpl-/);
  assert.deepEqual(answer.warnings, []);
  checkUsage(answer.usage);
}

export async function check_stream_equals_chat(cell) {
  const whole = await generateText({ ...greedy(cell), prompt: QUESTION });
  const stream = streamText({ ...greedy(cell), prompt: QUESTION });
  const deltas = [];
  for await (const delta of stream.textStream) deltas.push(delta);
  assert.equal(deltas.join(''), whole.text);
  assert.ok(deltas.length > 1, 'the text came in one piece');
  assert.equal(await stream.finishReason, whole.finishReason);
  const { inputTokens, outputTokens } = await stream.usage;
  assert.deepEqual([inputTokens, outputTokens], [whole.usage.inputTokens, whole.usage.outputTokens]);
}

export async function check_finish_reasons(cell) {
  const cut = await generateText({ ...greedy(cell), prompt: QUESTION, maxOutputTokens: 2 });
  assert.equal(cut.finishReason, 'length');
  const stopped = await generateText({ ...greedy(cell), prompt: QUESTION, stopSequences: ['Paris'] });
  assert.equal(stopped.finishReason, 'stop');
  assert.doesNotMatch(stopped.text, /Paris/);
}

export async function check_seeds_repeat(cell) {
  const sampling = { temperature: 1, topP: 0.9, seed: 7, presencePenalty: 0.1, frequencyPenalty: 0.1 };
  const request = { ...greedy(cell), ...sampling, prompt: 'Tell me a story.' };
  assert.equal((await generateText(request)).text, (await generateText(request)).text);
}

export async function check_a_tool_is_called_and_its_result_read(cell) {
  const cities = [];
  const answer = await generateText({
    ...greedy(cell),
    maxOutputTokens: 80,
    prompt: WEATHER,
    tools: { weather: weather(cities) },
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' }),
  });
  const [first, second] = answer.steps;
  assert.equal(answer.steps.length, 2);
  assert.equal(first.finishReason, 'tool-calls');
  assert.equal(first.toolCalls[0].toolName, 'weather');
  assert.deepEqual(cities, first.toolCalls.map((call) => call.input.city));
  assert.ok(second.text.length > 0);
  const { usage } = await generateText({ ...greedy(cell), prompt: WEATHER });
  assert.ok(second.usage.inputTokens > usage.inputTokens, 'the model did not see the call and its result');
}

export async function check_a_named_tool_is_called_in_a_stream(cell) {
  const cities = [];
  const stream = streamText({
    ...greedy(cell),
    maxOutputTokens: 80,
    prompt: WEATHER,
    tools: { forecast: weather([]), weather: weather(cities) },
    toolChoice: { type: 'tool', toolName: 'weather' },
  });
  const kinds = [];
  for await (const part of stream.fullStream) {
    assert.notEqual(part.type, 'error', String(part.error));
    kinds.push(part.type);
  }
  for (const kind of ['tool-input-start', 'tool-input-delta', 'tool-call', 'tool-result']) {
    assert.ok(kinds.includes(kind), kinds.join());
  }
  assert.equal(await stream.finishReason, 'tool-calls');
  assert.equal(cities.length, (await stream.toolCalls).length);
}

export async function check_objects_match_their_schema(cell) {
  const schema = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(99) }).strict();
  const output = Output.object({ schema });
  const request = { ...greedy(cell), maxOutputTokens: 80, prompt: 'Invent a person.', output };
  const whole = (await generateText(request)).output;
  schema.parse(whole);
  let partial;
  for await (partial of streamText(request).partialOutputStream);
  assert.deepEqual(partial, whole);
}

export async function check_choices_and_lists(cell) {
  const options = ['red', 'green'];
  const choice = await generateText({ ...greedy(cell), prompt: 'A colour?', output: Output.choice({ options }) });
  assert.ok(options.includes(choice.output));
  const element = z.enum(options);
  const list = await generateText({
    ...greedy(cell),
    maxOutputTokens: 200,
    prompt: 'Two colours?',
    output: Output.array({ element }),
  });
  assert.ok(list.output.every((colour) => options.includes(colour)));
}

export async function check_completions(cell) {
  const request = { ...GREEDY, model: connect(cell).completionModel(cell.model), prompt: '1, 2, 3, 4,' };
  const whole = await generateText(request);
  assert.match(whole.text, /5, 6/);
  checkUsage(whole.usage);
  assert.equal(await streamText(request).text, whole.text);
}

export async function check_invalid_requests_are_not_retried(cell) {
  const error = await callError(generateText({ ...greedy(cell), prompt: QUESTION, temperature: -1, maxRetries: 2 }));
  assert.deepEqual([error.statusCode, error.isRetryable], [400, false]);
  assert.equal(error.data.error.param, 'temperature');
  assert.match(error.message, /^temperature: /);
}

export async function check_unknown_models_are_not_found(cell) {
  const error = await callError(generateText({ ...GREEDY, model: connect(cell)('another'), prompt: QUESTION }));
  assert.deepEqual([error.statusCode, error.data.error.code], [404, 'model_not_found']);
}

export async function check_long_prompts_exceed_the_context_length(cell) {
  const error = await callError(generateText({ ...greedy(cell), prompt: 'a b c '.repeat(20000) }));
  assert.deepEqual([error.statusCode, error.data.error.code], [400, 'context_length_exceeded']);
  assert.match(error.message, /maximum context length/);
}

export async function check_a_streams_reader_is_told_of_errors(cell) {
  const errors = [];
  const onError = ({ error }) => errors.push(error);
  await streamText({ ...greedy(cell), prompt: QUESTION, temperature: -1, onError }).consumeStream();
  assert.deepEqual(errors.map((error) => error.statusCode), [400]);
}

export async function check_an_abort_ends_a_request(cell) {
  const providerOptions = { lockstep: { ignore_eos: true } };
  const aborter = new AbortController();
  const request = { ...greedy(cell), prompt: 'Count.', maxOutputTokens: 4000, providerOptions };
  const aborted = errorOf(generateText({ ...request, abortSignal: aborter.signal }));
  await untilRunning(cell, 1);
  aborter.abort();
  assert.equal((await aborted).name, 'AbortError');
  await untilRunning(cell, 0);
}

export async function check_an_abort_ends_a_stream(cell) {
  const providerOptions = { lockstep: { ignore_eos: true } };
  const aborter = new AbortController();
  let isAborted = false;
  const stream = streamText({
    ...greedy(cell),
    prompt: 'Count.',
    maxOutputTokens: 4000,
    providerOptions,
    abortSignal: aborter.signal,
    onAbort: () => { isAborted = true; },
  });
  for await (const part of stream.fullStream) if (part.type === 'text-delta') aborter.abort();
  assert.ok(isAborted);
  await untilRunning(cell, 0);
}

export async function check_many_chats_at_once(cell) {
  const chats = [...Array(8).keys()].map((number) => generateText({ ...greedy(cell), prompt: `Say ${number}.` }));
  (await Promise.all(chats)).forEach((answer) => checkUsage(answer.usage));
}
