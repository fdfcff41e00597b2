// @ts-check
/** Sends a question to the model, and adds the streamed reply to an answer. */
import { call, serverSent } from "./api.js";

/** @import { Answer, Chat } from "./types.d.ts" */

const NUM_ALTERNATIVES = 4;

/**
 * The body of the request for the answer to a chat's question.
 * @param {Chat} chat @param {number} turn @param {string} model
 */
export function bodyOf(chat, turn, model) {
  const { settings } = chat;
  /** @type {Record<string, unknown>} */
  const body = {
    model,
    messages: messagesOf(chat, turn),
    stream: true,
    stream_options: { include_usage: true },
    return_progress: true,
  };
  for (const name of /** @type {const} */ (["temperature", "top_p", "max_tokens", "seed"])) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  if (settings.tools.trim()) body.tools = parsed(settings.tools, "Tools");
  if (settings.schema.trim()) {
    const schema = parsed(settings.schema, "JSON schema");
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  return body;
}

/** @param {string} text @param {string} field */
function parsed(text, field) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${field} in the settings: ${/** @type {Error} */ (error).message}`);
  }
}

/** @param {Chat} chat @param {number} last */
function messagesOf(chat, last) {
  /** @type {Record<string, unknown>[]} */
  const messages = [];
  if (chat.settings.system) messages.push({ role: "system", content: chat.settings.system });
  chat.turns.slice(0, last + 1).forEach(({ question, answers }, number) => {
    if (question) messages.push({ role: "user", content: question });
    if (number < last && answers[0]) messages.push(...messagesOfAnswer(answers[0]));
  });
  return messages;
}

/** An answer, and the results of its calls. @param {Answer} answer */
function messagesOfAnswer({ text, calls }) {
  if (!calls.length) return [{ role: "assistant", content: text }];
  const made = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  const answered = calls.filter((call) => call.result !== undefined);
  return [
    { role: "assistant", content: text || null, tool_calls: made },
    ...answered.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result })),
  ];
}

/**
 * Streams an answer. shown is called whenever something was added.
 * @param {Record<string, unknown>} body @param {Answer} answer
 * @param {AbortSignal} stopped @param {() => void} shown
 */
export async function ask(body, answer, stopped, shown) {
  const begin = performance.now();
  const since = () => (performance.now() - begin) / 1000;
  try {
    answer.request = requestId();
    const headers = { "x-request-id": answer.request };
    const response = await call("v1/chat/completions", { body, signal: stopped, headers });
    for await (const data of serverSent(response)) {
      if (data === "[DONE]") answer.state = "done";
      else if (!data.startsWith(":")) takeChunk(answer, JSON.parse(data), since());
      shown();
    }
    if (answer.state !== "done") throw new Error("The server ended the answer too early.");
  } catch (error) {
    answer.state = stopped.aborted ? "stopped" : "failed";
    answer.error = stopped.aborted ? "" : /** @type {Error} */ (error).message;
  }
  answer.prompt = null;
  answer.speed.seconds = since();
  shown();
}

/** An id by which the other views show that the request comes from this page. */
function requestId() {
  const numbers = crypto.getRandomValues(new Uint32Array(4));
  return [...numbers].map((each) => each.toString(16)).join("-");
}

/** @param {Answer} answer @param {any} chunk @param {number} seconds since the question */
function takeChunk(answer, chunk, seconds) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.prompt_progress) {
    answer.prompt = { done: chunk.prompt_progress.processed, total: chunk.prompt_progress.total };
  }
  if (chunk.usage) {
    answer.speed.count = chunk.usage.completion_tokens;
    answer.speed.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  const choice = chunk.choices[0];
  if (!choice) return;
  const { delta } = choice;
  const text = delta.content ?? "";
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  if (text || reasoning || delta.tool_calls) {
    answer.speed.first ??= seconds;
    answer.speed.seconds = seconds;
    if (!chunk.usage) answer.speed.count += 1;
  }
  answer.text += text;
  answer.reasoning += reasoning;
  for (const part of delta.tool_calls ?? []) takeCall(answer, part);
  if (choice.logprobs?.content) answer.tokens.push(...choice.logprobs.content);
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

/** @param {Answer} answer @param {any} part */
function takeCall(answer, part) {
  answer.calls[part.index] ??= { id: part.id ?? "", name: "", arguments: "" };
  const known = answer.calls[part.index];
  known.name += part.function?.name ?? "";
  known.arguments += part.function?.arguments ?? "";
}

/** The same request as a command; the key stays a variable. @param {Record<string, unknown>} body */
export function curlOf(body) {
  const quoted = JSON.stringify(body).replace(/'/g, `'\\''`);
  return [
    `curl -N ${new URL("v1/chat/completions", location.href)}`,
    `-H 'Content-Type: application/json'`,
    `-H "Authorization: Bearer $BRIGADE_API_KEY"`,
    `-d '${quoted}'`,
  ].join(" \\\n  ");
}
