// Calls of tools with OpenAI's library for Node.

import assert from 'node:assert/strict';

import { zodFunction } from 'openai/helpers/zod';
import { z } from 'zod';

import { WEATHER, asksForWeather, collect, connect, say } from './asking.mjs';

const NAMED = { type: 'function', function: { name: 'get_weather' } };
const Forecast = z.object({ city: z.enum(['Paris', 'Rome']), days: z.union([z.literal(1), z.literal(2)]) });

function request(cell, options = {}) {
  return {
    model: cell.model,
    messages: asksForWeather(),
    tools: [WEATHER],
    parallel_tool_calls: false,
    temperature: 0,
    max_completion_tokens: 60,
    ...options,
  };
}

// The model calls by itself, because it must, and because it must call this one: whole, and assembled from a stream.
export async function check_calls(cell) {
  const { completions } = connect(cell).chat;
  for (const tool_choice of ['auto', 'required', NAMED]) {
    const whole = await completions.create(request(cell, { tool_choice }));
    const streamed = await completions.stream(request(cell, { tool_choice })).finalChatCompletion();
    for (const answer of [whole, streamed]) {
      const [choice] = answer.choices;
      assert.equal(choice.finish_reason, 'tool_calls');
      assert.equal(choice.message.tool_calls.length, 1);
      const [call] = choice.message.tool_calls;
      assert.match(call.id, /^call_/);
      assert.equal(call.type, 'function');
      assert.equal(call.function.name, 'get_weather');
      assert.deepEqual(JSON.parse(call.function.arguments), { city: 'Paris' });
    }
  }
}

// The first piece of a call has its type, id and name; the others have arguments alone.
export async function check_pieces_of_a_call(cell) {
  const pieces = await collect(
    await connect(cell).chat.completions.create(request(cell, { tool_choice: 'required', stream: true })),
  );
  const [first, ...others] = pieces.flatMap((piece) => piece.choices[0].delta.tool_calls ?? []);
  assert.deepEqual(Object.keys(first).sort(), ['function', 'id', 'index', 'type']);
  assert.equal(first.function.name, 'get_weather');
  for (const call of others) {
    assert.deepEqual([Object.keys(call).sort(), Object.keys(call.function)], [['function', 'index'], ['arguments']]);
  }
}

// With "none" there is a text and no call.
export async function check_no_call(cell) {
  const answer = await connect(cell).chat.completions.create(
    request(cell, { tool_choice: 'none', max_completion_tokens: 8 }),
  );
  assert.ok(answer.choices[0].message.content);
  assert.equal(answer.choices[0].message.tool_calls, undefined);
}

// Arguments in the form of a zod schema are parsed.
export async function check_parsed_arguments(cell) {
  const answer = await connect(cell).chat.completions.parse(
    request(cell, {
      messages: say('The weather in Rome for the next 2 days?'),
      tools: [zodFunction({ name: 'forecast', parameters: Forecast })],
      tool_choice: { type: 'function', function: { name: 'forecast' } },
    }),
  );
  Forecast.parse(answer.choices[0].message.tool_calls[0].function.parsed_arguments);
}

// The library runs a tool that is called, and sends its result back.
export async function check_run_tools(cell) {
  const asked = [];
  const getWeather = (args) => {
    asked.push(args);
    return 'Sunny, 20 degrees';
  };
  const tool = { ...WEATHER.function, function: getWeather, parse: JSON.parse };
  const runner = connect(cell).chat.completions.runTools(
    request(cell, { tools: [{ type: 'function', function: tool }], tool_choice: NAMED }),
  );
  const messages = [];
  runner.on('message', (message) => messages.push(message.role));
  await runner.done();
  assert.deepEqual(asked, [{ city: 'Paris' }]);
  assert.equal(messages.at(-1), 'tool');
}
