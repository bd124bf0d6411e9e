// Vercel's AI SDK, with its provider for servers like OpenAI's.

import { NAME, TURNS, WEATHER, run } from "./_case.mjs";

// --8<-- [start:example]
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const url = process.env.KVRECALL_URL ?? "http://127.0.0.1:8420";
const kvrecall = createOpenAICompatible({ name: "kvrecall", baseURL: `${url}/v1` });
const model = kvrecall(process.env.KVRECALL_MODEL ?? "reference");

const tools = {
  get_weather: tool({
    description: "Get the weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `sunny in ${city}`,
  }),
};

async function ask(prompt) {
  const { text } = await generateText({ model, prompt, tools, stopWhen: stepCountIs(5) });
  return text;
}
// --8<-- [end:example]

async function stream(prompt) {
  let text = "";
  const answer = streamText({ model, prompt, tools, stopWhen: stepCountIs(5) });
  for await (const piece of answer.textStream) text += piece;
  return text;
}

async function turns() {
  const messages = [];
  let answer;
  for (const text of TURNS) {
    messages.push({ role: "user", content: text });
    answer = await generateText({ model, messages, tools });
    messages.push(...answer.response.messages);
  }
  return answer.text;
}

await run({
  plain: () => ask(NAME),
  streamed: () => stream(NAME),
  turns,
  tools: () => ask(WEATHER),
  "streamed tools": () => stream(WEATHER),
});
