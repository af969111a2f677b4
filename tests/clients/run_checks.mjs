// Runs the checks of a Node client: `run_checks.mjs NAME ENVIRONMENT`.
//
// Each line of stdin is a JSON object with the names of a check and its file, and its arguments; each is answered
// by a line on stdout.

import { readdirSync } from 'node:fs';
import { registerHooks } from 'node:module';
import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

const [name, environment] = process.argv.slice(2);
const folder = new URL(`./${name}/`, import.meta.url);
// A file in the environment, where packages of that name are looked for.
const installed = pathToFileURL(`${environment}/package.json`).href;

// Checks import packages as if they were in the environment.
registerHooks({
  resolve(specifier, context, next) {
    const isPackage = !/^(\.|\/|[a-z]+:)/.test(specifier);
    const isOurs = context.parentURL?.startsWith(folder.href);
    return next(specifier, isPackage && isOurs ? { ...context, parentURL: installed } : context);
  },
});

// Clients write to stdout, too.
console.log = console.info = console.debug = console.error;

const modules = {};
for (const file of readdirSync(folder).filter((file) => file.endsWith('checks.mjs'))) {
  modules[file.replace('.mjs', '')] = await import(new URL(file, folder).href);
}

for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  let error = '';
  try {
    await modules[asked.file][asked.check](...asked.arguments);
  } catch (problem) {
    error = problem?.stack ?? String(problem);
  }
  process.stdout.write(`${JSON.stringify({ check: asked.check, ok: error === '', error })}\n`);
}
