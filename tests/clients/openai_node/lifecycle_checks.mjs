// Clients that leave, and services that go, as OpenAI's library for Node sees them.

import assert from 'node:assert/strict';

import OpenAI from 'openai';

import {
  QUESTION,
  askBriefly,
  beginEndless,
  connect,
  connectCounting,
  say,
  waitUntil,
  waitUntilIdle,
  waitUntilUnhealthy,
} from './asking.mjs';

// A request that is aborted frees its place, streamed or not.
export async function check_abort_controller(narrow) {
  for (const isStreamed of [false, true]) {
    const controller = new AbortController();
    const consume = async () => {
      const body = { model: narrow.model, messages: say(QUESTION), ignore_eos: true, stream: isStreamed };
      const answer = await connect(narrow).chat.completions.create(body, { signal: controller.signal });
      // An aborted stream ends without an error.
      for await (const _ of answer);
      throw new OpenAI.APIUserAbortError();
    };
    const ended = assert.rejects(consume(), OpenAI.APIUserAbortError);
    await waitUntil(narrow, { running: 1 });
    controller.abort();
    await ended;
    await waitUntilIdle(narrow);
  }
  assert.equal((await askBriefly(connect(narrow), narrow)).usage.completion_tokens, 2);
}

// Leaving the loop over a stream frees its place.
export async function check_left_loop(narrow) {
  for await (const _ of await beginEndless(narrow)) {
    await waitUntil(narrow, { running: 1 });
    break;
  }
  await waitUntilIdle(narrow);
}

// A client that gives up an answer which is not streamed frees its place.
export async function check_client_timeout(narrow) {
  const body = { model: narrow.model, messages: say(QUESTION), ignore_eos: true };
  const asked = connect(narrow).chat.completions.create(body, { timeout: 2000 });
  await assert.rejects(asked, OpenAI.APIConnectionTimeoutError);
  await waitUntilIdle(narrow);
}

// Without a scheduler requests are refused with 503; the library's retries last until it is back.
export async function check_lost_scheduler(narrow) {
  const revive = () => process.kill(narrow.scheduler_pid, 'SIGCONT');
  process.kill(narrow.scheduler_pid, 'SIGSTOP');
  try {
    await waitUntilUnhealthy(narrow);
    await assert.rejects(askBriefly(connect(narrow), narrow), (error) => {
      assert.ok(error instanceof OpenAI.InternalServerError);
      // The cell is unhealthy before the link to the scheduler has ended: the request may still be sent there.
      assert.ok(['not_ready', 'scheduler_lost'].includes(error.code), error.code);
      assert.deepEqual([error.status, error.type], [503, 'server_error']);
      return true;
    });
    const { client, statuses } = connectCounting(narrow, { maxRetries: 1000, onAnswer: revive });
    assert.equal((await askBriefly(client, narrow)).usage.completion_tokens, 2);
    assert.deepEqual([statuses[0], statuses.at(-1)], [503, 200]);
  } finally {
    revive();
  }
  await waitUntilIdle(narrow);
}

// While a service stops, its streams go on and new requests are refused with 503.
export async function check_draining(ending) {
  const stream = await beginEndless(ending);
  const pieces = stream[Symbol.asyncIterator]();
  await pieces.next();
  process.kill(ending.launcher_pid, 'SIGTERM');
  await waitUntilUnhealthy(ending);
  await assert.rejects(askBriefly(connect(ending), ending), (error) => {
    assert.deepEqual([error.status, error.code, error.headers.get('connection')], [503, 'draining', 'close']);
    return true;
  });
  for (let count = 0; count < 10; count += 1) {
    assert.equal((await pieces.next()).value.choices[0].finish_reason, null);
  }
  stream.controller.abort();
}
