// Errors as OpenAI's library for Node raises them, and which of them it retries.

import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';

import OpenAI from 'openai';

import {
  QUESTION,
  askBriefly,
  beginEndless,
  collect,
  connect,
  connectCounting,
  say,
  waitUntilIdle,
} from './asking.mjs';

// The error of this kind that a promise must be rejected with.
async function errorOf(kind, promise) {
  const error = await promise.then(
    () => assert.fail(`no ${kind.name}`),
    (problem) => problem,
  );
  assert.ok(error instanceof kind, error.stack);
  return error;
}

// The error of a chat that is not retried, though the client would.
async function refused(kind, cell, body = {}, options = {}) {
  const { client, statuses } = connectCounting(cell);
  const asked = client.chat.completions.create({ model: cell.model, messages: say(QUESTION), ...body }, options);
  const error = await errorOf(kind, asked);
  assert.deepEqual(statuses, [error.status]);
  return error;
}

// A wrong field is a BadRequestError with its name.
export async function check_bad_request(cell) {
  for (const [body, param] of [
    [{ temperature: -1 }, 'temperature'],
    [{ max_completion_tokens: 0 }, 'max_completion_tokens'],
    [{ top_logprobs: 2 }, 'top_logprobs'],
    [{ best_of: 3 }, 'best_of'],
    [{ messages: [] }, 'messages'],
  ]) {
    const error = await refused(OpenAI.BadRequestError, cell, body);
    assert.deepEqual([error.type, error.code, error.param], ['invalid_request_error', 'invalid_request', param]);
  }
}

// A prompt that is too long has OpenAI's code and words, by which proxies know it.
export async function check_context_length(cell) {
  const error = await refused(OpenAI.BadRequestError, cell, { messages: say('word '.repeat(9000)) });
  assert.equal(error.code, 'context_length_exceeded');
  assert.match(error.message, /maximum context length/);
}

// What this cell cannot give is a BadRequestError with the reason.
export async function check_precondition(narrow) {
  assert.equal((await refused(OpenAI.BadRequestError, narrow, { determinism: 'exact' })).code, 'exact_unavailable');
}

// Another model and another path are a NotFoundError; another method is 405.
export async function check_not_found(cell) {
  const error = await refused(OpenAI.NotFoundError, cell, { model: 'other' });
  assert.deepEqual([error.code, error.param], ['model_not_found', 'model']);
  assert.equal((await errorOf(OpenAI.NotFoundError, connect(cell).get('/nothing'))).code, 'not_found');
  assert.equal((await errorOf(OpenAI.APIError, connect(cell).get('/chat/completions'))).status, 405);
}

// A body above 4 MiB is 413, though the client has not sent all of it.
export async function check_too_large(cell) {
  const error = await refused(OpenAI.APIError, cell, { messages: say('x'.repeat(5 << 20)) });
  assert.deepEqual([error.status, error.code], [413, 'request_too_large']);
}

// Another content type is 415, a long header line 431.
export async function check_heads(cell) {
  for (const [headers, status] of [
    [{ 'Content-Type': 'text/plain' }, 415],
    [{ 'X-Long': 'x'.repeat(9000) }, 431],
  ]) {
    assert.equal((await refused(OpenAI.APIError, cell, {}, { headers })).status, status);
  }
}

// Other APIs are 501, by name and without a retry.
export async function check_not_supported(cell) {
  const { client, statuses } = connectCounting(cell);
  const moderated = client.moderations.create({ input: 'x' });
  const error = await errorOf(OpenAI.InternalServerError, moderated);
  assert.deepEqual([error.status, error.code, statuses], [501, 'not_supported', [501]]);
  assert.match(error.message, /\/v1\/moderations/);
}

// A request that takes longer than its timeout_s is 504, without a retry; a stream ends with the error.
export async function check_server_timeout(narrow) {
  const error = await refused(OpenAI.InternalServerError, narrow, { ignore_eos: true, timeout_s: 0.4 });
  assert.deepEqual([error.status, error.code], [504, 'deadline_passed']);
  const stream = await beginEndless(narrow, { timeout_s: 1.5 });
  assert.equal((await errorOf(OpenAI.APIError, collect(stream))).code, 'deadline_passed');
  await waitUntilIdle(narrow);
}

// A stream of a request that an operator aborts ends with the error.
export async function check_abort(narrow) {
  const stream = await beginEndless(narrow);
  const read = async () => {
    let isFirst = true;
    for await (const piece of stream) {
      if (isFirst) {
        const [program, ...args] = narrow.abort;
        execFileSync(program, [...args, piece.id.replace('chatcmpl-', '')], { cwd: narrow.root });
        isFirst = false;
      }
    }
  };
  assert.equal((await errorOf(OpenAI.APIError, read())).code, 'aborted_by_call');
  await waitUntilIdle(narrow);
}

// A full queue is a RateLimitError that says when to come again.
export async function check_full_queue(narrow) {
  const streams = [await beginEndless(narrow), await beginEndless(narrow)];
  const error = await errorOf(OpenAI.RateLimitError, askBriefly(connect(narrow), narrow));
  assert.deepEqual([error.code, error.type], ['server_overloaded', 'rate_limit_error']);
  assert.ok(Number(error.headers.get('retry-after')) >= 1);
  assert.ok(Number(error.headers.get('retry-after-ms')) >= 1);
  streams.forEach((stream) => stream.controller.abort());
  await waitUntilIdle(narrow);
}

// The library tries again after a full queue, and succeeds when there is room.
export async function check_retry_of_a_full_queue(narrow) {
  const streams = [await beginEndless(narrow), await beginEndless(narrow)];
  const onAnswer = () => streams.splice(0).forEach((stream) => stream.controller.abort());
  const { client, statuses } = connectCounting(narrow, { maxRetries: 100, onAnswer });
  assert.equal((await askBriefly(client, narrow)).usage.completion_tokens, 2);
  assert.deepEqual([statuses[0], statuses.at(-1)], [429, 200]);
  assert.ok(statuses.slice(0, -1).every((status) => status === 429));
  await waitUntilIdle(narrow);
}
