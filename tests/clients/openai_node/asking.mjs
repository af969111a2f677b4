// What the checks ask, of which cell, and when that cell is idle.

import { setTimeout as sleep } from 'node:timers/promises';

import OpenAI from 'openai';

export const QUESTION = 'What is the capital of France?';
export const WEATHER = {
  type: 'function',
  function: {
    name: 'get_weather',
    description: 'Get the weather of a city',
    parameters: {
      type: 'object',
      properties: { city: { type: 'string', maxLength: 20 } },
      required: ['city'],
      additionalProperties: false,
    },
  },
};

// A client that does not retry, unless the options say so.
export function connect(cell, options = {}) {
  return new OpenAI({ baseURL: cell.base_url, apiKey: 'none', maxRetries: 0, ...options });
}

// A client that retries, and the statuses of the answers that it gets.
export function connectCounting(cell, { maxRetries = 3, onAnswer = () => {} } = {}) {
  const statuses = [];
  const client = connect(cell, {
    maxRetries,
    fetch: async (...request) => {
      const answer = await fetch(...request);
      statuses.push(answer.status);
      await onAnswer(answer);
      return answer;
    },
  });
  return { client, statuses };
}

export function say(text) {
  return [{ role: 'user', content: text }];
}

// A chat that makes the small model call `get_weather` for Paris.
export function asksForWeather() {
  const messages = ['Rome', 'Oslo', 'Bern'].flatMap((city, index) => {
    const call = {
      id: `call_${index}`,
      type: 'function',
      function: { name: 'get_weather', arguments: JSON.stringify({ city }) },
    };
    return [...say(`What is the weather in ${city}?`), { role: 'assistant', tool_calls: [call] }];
  });
  return [...messages, ...say('What is the weather in Paris?')];
}

export async function collect(stream) {
  const pieces = [];
  for await (const piece of stream) {
    pieces.push(piece);
  }
  return pieces;
}

export function textOf(pieces) {
  return pieces.map((piece) => piece.choices[0]?.delta?.content ?? piece.choices[0]?.text ?? '').join('');
}

// A stream that goes on until it is aborted; it has been submitted.
export function beginEndless(cell, options = {}) {
  return connect(cell).chat.completions.create({
    model: cell.model,
    messages: say(QUESTION),
    stream: true,
    ignore_eos: true,
    ...options,
  });
}

export function askBriefly(client, cell) {
  return client.chat.completions.create({ model: cell.model, messages: say(QUESTION), max_completion_tokens: 2 });
}

// Wait until the cell runs, and lets wait, this many requests.
export async function waitUntil(cell, counts) {
  while (true) {
    const metrics = await (await fetch(`${cell.url}/metrics`)).text();
    const isReached = ([name, count]) =>
      Number(metrics.match(new RegExp(`^lockstep_cell_num_requests_${name} (.*)$`, 'm'))[1]) === count;
    if (Object.entries(counts).every(isReached)) {
      return;
    }
    await sleep(50);
  }
}

export function waitUntilIdle(cell) {
  return waitUntil(cell, { running: 0, waiting: 0 });
}

export async function waitUntilUnhealthy(cell) {
  while ((await fetch(`${cell.url}/health`)).status === 200);
}
