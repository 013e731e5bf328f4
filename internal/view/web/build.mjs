// Bundles src/ into dist/, which is committed and embedded: flame.js and flame.css are one
// line each with no reference to anything outside, and LICENSES says whose code they hold.
import { build } from "esbuild";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";

const result = await build({
  entryPoints: ["src/flame.js"],
  bundle: true,
  minify: true,
  format: "iife",
  target: ["es2020"],
  charset: "ascii",
  legalComments: "none",
  metafile: true,
  outdir: "dist",
});

// Whatever of node_modules is in the bundle.
const packages = new Set();
for (const input of Object.keys(result.metafile.inputs)) {
  const match = /^node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(input);
  if (match) packages.add(match[1]);
}
const texts = [...packages].sort().map((name) => {
  const dir = `node_modules/${name}`;
  const { version, license } = JSON.parse(readFileSync(`${dir}/package.json`, "utf8"));
  const file = readdirSync(dir).find((entry) => /^licen[cs]e/i.test(entry));
  if (!file) throw new Error(`${name} has no licence file`);
  return `==== ${name} ${version} (${license}) ====\n\n${readFileSync(`${dir}/${file}`, "utf8").trim()}\n`;
});
writeFileSync("dist/LICENSES", texts.join("\n"));
