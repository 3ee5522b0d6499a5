// llama.cpp by node-llama-cpp: the probabilities of the next token after each of the given ones.
//     node interop_llama_cpp.mjs MODEL.gguf TOKENS.json OUT.json
import fs from "fs";
import { getLlama } from "node-llama-cpp";

const [, , file, tokens, out] = process.argv;
const llama = await getLlama({ gpu: false, build: "never", logLevel: "error" });
const model = await llama.loadModel({ modelPath: file });
const context = await model.createContext({ contextSize: 256 });
// Of all tokens, as the model gives them
const options = { temperature: 1, topK: 0, topP: 1, minP: 0 };
const input = JSON.parse(fs.readFileSync(tokens)).map((token) => [
  token,
  { generateNext: { probabilities: true, options } },
]);
const results = await context.getSequence().controlledEvaluate(input);
const rows = results.map((result) => Object.fromEntries(result.next.probabilities));
fs.writeFileSync(out, JSON.stringify(rows));
await llama.dispose();
