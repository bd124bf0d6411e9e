// llama.cpp as node-llama-cpp has it, with the build for this processor: `node llama_node.mjs GGUF
// THREADS CONTEXT`. The protocol of lines.py. One sequence holds the session as a server's slot
// does: only what differs from it is evaluated.
import {readFileSync} from "node:fs";
import {createRequire} from "node:module";
import {dirname, join} from "node:path";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

// The package is in the folder that the program is started in, not beside this file.
const entry = createRequire(join(process.cwd(), "package.json")).resolve("node-llama-cpp");
const {getLlama} = await import(pathToFileURL(entry).href);
const [file, threads, contextSize] = process.argv.slice(2);

const llama = await getLlama({
    gpu: false, build: "never", logLevel: "error", maxThreads: Number(threads)
});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({
    contextSize: Number(contextSize), threads: Number(threads), sequences: 1, batchSize: 512
});
const sequence = context.getSequence();
const manifest = JSON.parse(readFileSync(join(dirname(entry), "..", "package.json")));
console.log(JSON.stringify({
    "node-llama-cpp": manifest.version,
    "llama.cpp": llama.llamaCppRelease.release,
    features: llama.systemInfo
}));

for await (const line of createInterface({input: process.stdin})) {
    const request = JSON.parse(line);
    const held = sequence.contextTokens;
    let same = 0;
    // A last token has to be evaluated again.
    while (same < Math.min(held.length, request.prompt.length - 1) &&
        held[same] === request.prompt[same]) same++;
    if (same < held.length)
        await sequence.eraseContextTokenRanges([{start: same, end: held.length}]);
    const tokens = request.prompt.slice(same);
    if (request.max_tokens === 0)
        await sequence.evaluateWithoutGeneratingNewTokens(tokens);
    else {
        let count = 0;
        for await (const token of sequence.evaluate(tokens, {temperature: 0})) {
            console.log(token);
            if (++count === request.max_tokens) break;
        }
    }
    console.log("end");
}
