// Claude Code itself, in print mode, against a cell: it finds tools, calls and the cache as it does at Anthropic.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { mkdtemp, readFile, writeFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

import { LAST_WORDS } from '../directing.mjs';
import { direct } from './director.mjs';

const LEAST_SHARE = 0.95;

/** A session reads a file, edits it, runs a command and ends; the next turn finds the first one's prompt cached. */
export async function check_a_session(agents) {
  const folder = await mkdtemp(join(tmpdir(), 'project-'));
  const file = join(folder, 'greeting.txt');
  await writeFile(file, 'hello\n');
  const director = await direct(agents, [
    ['Read', { file_path: file }],
    ['Edit', { file_path: file, old_string: 'hello', new_string: 'goodbye' }],
    ['Bash', { command: `cat ${file}` }],
  ]);
  try {
    const first = await ask(director.url, agents.model, folder, ['Say goodbye in greeting.txt.']);
    assert.equal(await readFile(file, 'utf8'), 'goodbye\n');
    assert.deepEqual(
      [first.subtype, first.is_error, first.result, first.num_turns],
      ['success', false, JSON.stringify(LAST_WORDS), 4],
    );
    assert.deepEqual(
      director.turns.map((turn) => turn.stopReason),
      ['tool_use', 'tool_use', 'tool_use', 'end_turn'],
    );
    const shared = promptTokens(director.turns.findLast((turn) => turn.offersTools).usage);
    await writeFile(file, 'hello\n');
    const second = await ask(director.url, agents.model, folder, ['--continue', 'And again.']);
    assert.equal(second.subtype, 'success');
    assert.equal(await readFile(file, 'utf8'), 'goodbye\n');
    const usage = director.turns[4].usage;
    assert.ok(promptTokens(usage) > shared);
    assert.ok(usage.cache_read_input_tokens >= LEAST_SHARE * shared, JSON.stringify(director.turns));
  } finally {
    director.close();
  }
}

function promptTokens(usage) {
  return usage.input_tokens + usage.cache_read_input_tokens;
}

/** What Claude Code says at the end, as JSON. */
async function ask(url, model, folder, words) {
  const [head, ...rest] = words;
  const prompt = rest.length ? [head, '--print', ...rest] : ['--print', head];
  const options = ['--output-format', 'json', '--model', model, '--allowedTools', 'Read', 'Edit', 'Bash'];
  // The package's own program would be put in place by an install script.
  const own = createRequire(`${process.argv[3]}/package.json`);
  const wrapper = own.resolve('@anthropic-ai/claude-code/cli-wrapper.cjs');
  const variables = {
    ...process.env,
    ANTHROPIC_BASE_URL: url,
    ANTHROPIC_API_KEY: 'none',
    ANTHROPIC_DEFAULT_HAIKU_MODEL: model,
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: '1',
  };
  const child = spawn(process.execPath, [wrapper, ...prompt, ...options], {
    cwd: folder,
    env: variables,
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  const [output, problems] = await Promise.all([child.stdout, child.stderr].map((stream) => stream.toArray()));
  const text = Buffer.concat(output).toString();
  try {
    return JSON.parse(text);
  } catch {
    throw new Error(`no JSON: ${text} ${Buffer.concat(problems)}`);
  }
}
