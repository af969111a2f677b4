// Codex itself, against a cell: it finds tools, calls and the cache as it does at OpenAI.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { mkdtemp, readFile, writeFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

import { LAST_WORDS } from '../directing.mjs';
import { direct } from './director.mjs';

const LEAST_SHARE = 0.95;
// Codex knows its tools by the model: this one gets `apply_patch`, a custom tool. The director asks for the cell's.
const MODEL = 'gpt-5.5';

/** A session reads a file, edits it, runs a command and ends; the next turn finds the first one's prompt cached. */
export async function check_a_session(agents) {
  const folder = await mkdtemp(join(tmpdir(), 'project-'));
  const [file, copy] = ['greeting.txt', 'copy.txt'].map((name) => join(folder, name));
  await writeFile(file, 'hello\n');
  const patch = `*** Begin Patch\n*** Update File: ${file}\n@@\n-hello\n+goodbye\n*** End Patch\n`;
  const director = await direct(agents, [
    ['exec_command', { cmd: `cat ${file}` }],
    ['apply_patch', patch],
    ['exec_command', { cmd: `cp ${file} ${copy}` }],
  ]);
  try {
    const first = await ask(director.url, folder, ['Say goodbye in greeting.txt.']);
    assert.equal(await readFile(copy, 'utf8'), 'goodbye\n', first);
    assert.ok(first.includes(JSON.stringify(LAST_WORDS)), first);
    assert.deepEqual(
      director.turns.map((turn) => final(turn).output.at(-1).type),
      ['function_call', 'custom_tool_call', 'function_call', 'message'],
    );
    for (const turn of director.turns) {
      assert.equal(final(turn).status, 'completed');
      // Tools of other types are skipped, and said to be.
      const skipped = turn.types.flatMap((type, index) => (['function', 'custom'].includes(type) ? [] : [index]));
      assert.ok(skipped.length > 0);
      skipped.forEach((index) => assert.ok(turn.ignored.includes(`tools[${index}]`), turn.ignored));
    }
    const shared = final(director.turns.at(-1)).usage.input_tokens;
    await writeFile(file, 'hello\n');
    await ask(director.url, folder, ['resume', '--last', 'And again.']);
    assert.equal(await readFile(copy, 'utf8'), 'goodbye\n');
    const { usage } = final(director.turns[4]);
    assert.ok(usage.input_tokens > shared);
    const cached = usage.input_tokens_details.cached_tokens;
    assert.ok(cached >= LEAST_SHARE * shared, `${cached} of ${shared}`);
  } finally {
    director.close();
  }
}

function final(turn) {
  return turn.events.at(-1).response;
}

/** What Codex writes. */
async function ask(url, folder, words) {
  const provider = `{name="cell",base_url="${url}/v1",wire_api="responses"}`;
  const settings = ['model_provider="cell"', `model_providers.cell=${provider}`, 'check_for_update_on_startup=false'];
  const options = ['--skip-git-repo-check', '--dangerously-bypass-approvals-and-sandbox', '--model', MODEL];
  const program = createRequire(`${process.argv[3]}/package.json`).resolve('@openai/codex/bin/codex.js');
  const given = settings.flatMap((setting) => ['-c', setting]);
  const child = spawn(process.execPath, [program, 'exec', ...given, ...options, ...words], {
    cwd: folder,
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  const outputs = await Promise.all([child.stdout, child.stderr].map((stream) => stream.toArray()));
  return Buffer.concat(outputs.flat()).toString();
}
