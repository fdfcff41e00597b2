// @ts-check
/** A chat for trying the model and its adapters. */
import { call } from "../lib/api.js";
import { ask, bodyOf, curlOf } from "../lib/asking.js";
import { begin, changed, chat, chats, current, emptyAnswer, remove } from "../lib/chats.js";
import { html, signal, useEffect, useRef } from "../lib/dom.js";
import { adapters, announce } from "../lib/store.js";
import { save } from "../lib/trace.js";
import { AnswerView } from "./chat_answer.js";
import { Settings, models } from "./chat_settings.js";

/** @typedef {import("../lib/chats.js").Answer} Answer */
/** @typedef {import("../lib/chats.js").Chat} Chat */
/** @typedef {import("../lib/chats.js").Turn} Turn */

/** The controllers that stop running answers, by chat. */
const asked = signal(/** @type {ReadonlyMap<string, AbortController>} */ (new Map()));
const trouble = signal("");
const draft = signal("");
const isSetting = signal(false);
const copied = signal("");
const isPhone = matchMedia("(max-width: 760px), (pointer: coarse)").matches;

export function View() {
  useEffect(() => void loadModels(), [adapters.value.map((each) => each.name).join("\n")]);
  return html`<h1 class="unseen">Chat</h1>
    <div class="chat">
      <${List} />
      <section class="talk" aria-label="Conversation">
        <${Bar} />
        ${isSetting.value && html`<${Settings} />`}
        <${Turns} />
        ${trouble.value && html`<p class="notice bad" role="alert">${trouble.value}</p>`}
        <${Composer} />
      </section>
    </div>`;
}

async function loadModels() {
  try {
    const listed = await (await call("v1/models")).json();
    models.value = listed.data.map((/** @type {{id: string}} */ each) => each.id);
    trouble.value = "";
  } catch (error) {
    trouble.value = /** @type {Error} */ (error).message;
  }
}

function List() {
  return html`<aside class="chats" aria-label="Chats">
    <button type="button" class="first" onClick=${begin}>New chat</button>
    <ul>
      ${chats.value.map(
        (each) => html`<li key=${each.id}>
          <button type="button" class="title" aria-current=${each.id === current.value ? "true" : undefined} onClick=${() => (current.value = each.id)}>${each.title}</button>
          <button type="button" class="quiet" aria-label=${`Delete ${each.title}`} onClick=${() => remove(each.id)}>×</button>
        </li>`,
      )}
    </ul>
    <p class="hint">Saved in this browser only.</p>
  </aside>`;
}

function Bar() {
  const { settings } = chat();
  const names = [settings.model || "default model", settings.second].filter(Boolean).join(" and ");
  return html`<div class="bar">
    <p><b>${names}</b></p>
    <div class="buttons">
      <button type="button" aria-expanded=${isSetting.value} onClick=${() => (isSetting.value = !isSetting.value)}>Settings</button>
      <button type="button" disabled=${!chat().turns.length} onClick=${exportJson}>Export JSON</button>
      <button type="button" disabled=${!chat().turns.length} onClick=${copyCurl}>${copied.value || "Copy as curl"}</button>
    </div>
  </div>`;
}

function exportJson() {
  const text = JSON.stringify(chat(), null, 2);
  save(new Blob([text], { type: "application/json" }), "brigade-chat.json");
}

async function copyCurl() {
  const shown = chat();
  try {
    const body = bodyOf(shown, shown.turns.length - 1, shown.settings.model);
    await navigator.clipboard.writeText(curlOf(body));
    copied.value = "Copied";
  } catch (error) {
    trouble.value = `The command was not copied: ${/** @type {Error} */ (error).message}`;
  }
  setTimeout(() => (copied.value = ""), 2000);
}

function Turns() {
  const list = useRef(/** @type {HTMLElement | null} */ (null));
  const { turns, id } = chat();
  const isFollowed = useRef(true);
  useEffect(() => {
    const own = list.current;
    if (own && isFollowed.current) own.scrollTop = own.scrollHeight;
  });
  /** @param {Event} event */
  const note = ({ target }) => {
    const own = /** @type {HTMLElement} */ (target);
    isFollowed.current = own.scrollHeight - own.scrollTop - own.clientHeight < 40;
  };
  if (!turns.length) {
    return html`<div class="turns"><p class="empty"><b>Ask the model something.</b><br />Choose an adapter, sampling and tools under Settings. Two models can answer side by side.</p></div>`;
  }
  return html`<div class="turns" ref=${list} onScroll=${note} tabindex="0" role="group" aria-label="Messages">
    ${turns.map((turn, number) => html`<${TurnView} key=${`${id}${number}`} turn=${turn} number=${number} />`)}
  </div>`;
}

/** @param {{turn: Turn, number: number}} props */
function TurnView({ turn, number }) {
  const isBusy = turn.answers.some((answer) => answer.state === "running");
  const [first] = turn.answers;
  const isOpen = number === chat().turns.length - 1 && first?.state === "done" && first.calls.length;
  return html`<article class="turn">
    <div class="question">
      ${turn.question && html`<p>${turn.question}</p>`}
      ${!isBusy && html`<p class="actions">
        ${turn.question && html`<button type="button" class="quiet" onClick=${() => edit(number)}>Edit</button>`}
        <button type="button" class="quiet" onClick=${() => answerAgain(number)}>Retry</button>
      </p>`}
    </div>
    <div class=${`answers n${turn.answers.length}`} aria-busy=${isBusy}>
      ${turn.answers.map((answer) => html`<${AnswerView} answer=${answer} isNamed=${turn.answers.length > 1} version=${answer.text.length + answer.reasoning.length} />`)}
    </div>
    ${isOpen ? html`<${Results} calls=${first.calls} />` : null}
  </article>`;
}

/** The form for the results of the calls in the latest answer. @param {{calls: Answer["calls"]}} props */
function Results({ calls }) {
  /** @param {SubmitEvent} event */
  const submit = (event) => {
    event.preventDefault();
    const results = new FormData(/** @type {HTMLFormElement} */ (event.target)).getAll("result");
    calls.forEach((call, number) => (call.result = String(results[number])));
    continueWith("");
  };
  return html`<form class="results" onSubmit=${submit}>
    ${calls.map((call) => html`<label>Result of ${call.name}<textarea name="result" rows="2" required></textarea></label>`)}
    <button type="submit" class="first">Send results</button>
  </form>`;
}

function Composer() {
  const isBusy = asked.value.has(current.value);
  /** @param {KeyboardEvent} event */
  const onKey = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!isBusy) send();
  };
  /** @param {Event} event */
  const submit = (event) => {
    event.preventDefault();
    send();
  };
  return html`<form class="composer" onSubmit=${submit}>
    <label class="unseen" for="question">Question</label>
    <textarea
      id="question"
      rows="2"
      placeholder=${isPhone ? "Ask something" : "Enter to send, Shift+Enter for a new line"}
      value=${draft.value}
      onInput=${(/** @type {any} */ event) => (draft.value = event.target.value)}
      onKeyDown=${onKey}
    ></textarea>
    ${isBusy
      ? html`<button type="button" class="danger" onClick=${() => asked.value.get(current.value)?.abort()}>Stop</button>`
      : html`<button type="submit" class="first" disabled=${!draft.value.trim()}>Send</button>`}
  </form>`;
}

// --- questions and answers

function send() {
  const question = draft.value.trim();
  if (!question) return;
  draft.value = "";
  continueWith(question);
}

/** @param {string} question is empty after results of calls */
function continueWith(question) {
  const own = chat();
  own.turns.push({ question, answers: [] });
  if (own.turns.length === 1) own.title = question.slice(0, 60);
  void answer(own, own.turns.length - 1);
}

/** @param {number} number */
function edit(number) {
  draft.value = chat().turns[number].question;
  chat().turns.splice(number);
  changed();
  document.getElementById("question")?.focus();
}

/** @param {number} number */
function answerAgain(number) {
  const own = chat();
  own.turns.splice(number + 1);
  void answer(own, number);
}

/** @param {Chat} own @param {number} number */
async function answer(own, number) {
  const stopping = new AbortController();
  const { model, second } = own.settings;
  const turn = own.turns[number];
  trouble.value = "";
  asked.value = new Map([...asked.value, [own.id, stopping]]);
  const shown = oncePerFrame(() => changed(false));
  try {
    const bodies = [model, second].filter((name, place) => name || !place).map((name) => bodyOf(own, number, name));
    turn.answers = bodies.map((body) => emptyAnswer(String(body.model)));
    changed();
    await Promise.all(bodies.map((body, place) => ask(body, turn.answers[place], stopping.signal, shown)));
    announce(turn.answers.map(ending).join(" "));
  } catch (error) {
    trouble.value = /** @type {Error} */ (error).message;
  } finally {
    asked.value = new Map([...asked.value].filter(([id]) => id !== own.id));
    changed();
  }
}

/** How an answer ended, in words. @param {Answer} answer */
function ending(answer) {
  if (answer.state === "failed") return `The answer failed: ${answer.error}`;
  return answer.state === "stopped" ? "The answer was stopped." : "The answer is complete.";
}

/** Calls an action at most once in each frame of the screen. @param {() => void} action */
function oncePerFrame(action) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      action();
    });
  };
}
