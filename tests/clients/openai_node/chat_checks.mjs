// Chats with OpenAI's library for Node.

import assert from 'node:assert/strict';

import OpenAI from 'openai';

export async function check_chat(cell) {
  const client = new OpenAI({ baseURL: cell.base_url, apiKey: 'none', maxRetries: 0 });
  const answer = await client.chat.completions.create({
    model: cell.model,
    messages: [{ role: 'user', content: 'Hi' }],
    max_completion_tokens: 8,
  });
  assert.ok(answer.choices[0].message.content);
  assert.equal(answer.model, cell.model);
}
