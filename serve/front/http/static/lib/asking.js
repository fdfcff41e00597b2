/** Sends a question to the model, and adds the streamed reply to an answer. */
import { call, serverSent } from "./api.js";

/** @import { Answer, Chat } from "./types.d.ts" */

/**
 * The body of the request for the answer to a chat's question.
 * @param {Chat} chat @param {number} turn @param {string} model
 */
export function bodyOf({ settings, turns }, turn, model) {
  const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
  turns.slice(0, turn + 1).forEach(({ question, answers }, number) => {
    messages.push({ role: "user", content: question });
    if (number < turn && answers[0]) messages.push({ role: "assistant", content: answers[0].text });
  });
  /** @type {Record<string, unknown>} */
  const body = {
    model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    return_progress: true,
  };
  for (const name of /** @type {const} */ (["temperature", "top_p", "max_tokens", "seed"])) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  return body;
}

/**
 * Streams an answer. shown is called whenever something was added.
 * @param {object} body @param {Answer} answer @param {AbortSignal} signal @param {() => void} shown
 */
export async function ask(body, answer, signal, shown) {
  const begin = performance.now();
  const since = () => (performance.now() - begin) / 1000;
  try {
    const response = await call("v1/chat/completions", { body, signal });
    for await (const data of serverSent(response)) {
      if (data === "[DONE]") answer.state = "done";
      else if (!data.startsWith(":")) takeChunk(answer, JSON.parse(data), since());
      shown();
    }
    if (answer.state !== "done") throw new Error("The server ended the answer too early.");
  } catch (error) {
    answer.state = signal.aborted ? "stopped" : "failed";
    answer.error = signal.aborted ? "" : error.message;
  }
  answer.speed.seconds = since();
  shown();
}

/** @param {Answer} answer @param {any} chunk @param {number} seconds since the question */
function takeChunk(answer, { choices, error, prompt_progress: progress, usage }, seconds) {
  if (error) throw new Error(error.message);
  const { speed } = answer;
  if (progress) answer.prompt = { done: progress.processed, total: progress.total };
  if (usage) {
    speed.count = usage.completion_tokens;
    speed.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  const [choice] = choices;
  if (!choice) return;
  const text = choice.delta.content ?? "";
  const reasoning = choice.delta.reasoning_content ?? "";
  if (text || reasoning) {
    speed.first ??= seconds;
    speed.seconds = seconds;
    if (!usage) speed.count += 1;
  }
  answer.text += text;
  answer.reasoning += reasoning;
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}
