// Vercel's AI SDK with its provider for servers like OpenAI's.
import assert from "node:assert/strict";
import test from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "brigade",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const base = { model: provider("tiny-chat"), temperature: 0, maxOutputTokens: 40, maxRetries: 0 };
const prompt = "Say the alphabet.";

test("a stream is the reply", async () => {
  const reply = await generateText({ ...base, prompt });
  assert.ok(reply.text.startsWith("a, b, c"));
  const stream = streamText({ ...base, prompt });
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, reply.text);
  assert.equal((await stream.usage).outputTokens, reply.usage.outputTokens);
});

test("a tool that is demanded", async () => {
  const weather = tool({ description: "The weather.", inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }) });
  const options = { ...base, prompt, tools: { weather }, toolChoice: "required", maxOutputTokens: 100 };
  const reply = await generateText(options);
  assert.equal(reply.toolCalls[0].toolName, "weather");
  const stream = streamText(options);
  assert.deepEqual((await stream.toolCalls)[0].input, reply.toolCalls[0].input);
});

test("structured output", async () => {
  const output = Output.object({ schema: z.object({ colour: z.enum(["red", "green"]) }) });
  const reply = await generateText({ ...base, maxOutputTokens: 200, prompt, output });
  assert.ok(["red", "green"].includes(reply.output.colour));
});
