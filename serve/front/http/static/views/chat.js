// @ts-check
/** A chat for trying the model and its adapters. */
import { call } from "../lib/api.js";
import { ask, bodyOf, curlOf } from "../lib/asking.js";
import { begin, chat, chats, choose, emptyAnswer, remove, save } from "../lib/chats.js";
import { redraw, tags } from "../lib/dom.js";
import { announce, state } from "../lib/store.js";
import { saveFile } from "../lib/trace.js";
import { answerView } from "./chat_answer.js";
import { chatSettings } from "./chat_settings.js";

/** @import { Answer, Call, Chat, Turn } from "../lib/types.d.ts" */

const { article, aside, b, br, button, div, form, h1, label, li, p, section, textarea, ul } = tags;
const NEAR_END_PIXELS = 40;
const COPIED_MILLISECONDS = 2000;
const phone = matchMedia("(max-width: 760px), (pointer: coarse)");

/** What stops the running answers of a chat. @type {Map<Chat, AbortController>} */
const asked = new Map();
let models = /** @type {string[]} */ ([]);
let modelsOf = ""; // the adapters for which the models were listed
let trouble = "";
let draft = "";
let isSetting = false;
let isCopied = false;
let isFollowed = true;

export function chatView() {
  void listModels();
  return [
    h1({ class: "unseen" }, "Chat"),
    div(
      { class: "chat" },
      list(),
      section(
        { class: "talk", "aria-label": "Conversation" },
        bar(),
        isSetting && chatSettings(models),
        turns(),
        trouble && p({ class: "notice bad", role: "alert" }, trouble),
        composer(),
      ),
    ),
  ];
}

/** Lists the models again whenever there are other adapters. */
async function listModels() {
  const names = `of ${state.adapters.map(({ name }) => name).join("\n")}`;
  if (names === modelsOf) return;
  modelsOf = names;
  try {
    const listed = await (await call("v1/models")).json();
    models = listed.data.map((/** @type {{id: string}} */ { id }) => id);
    trouble = "";
  } catch (error) {
    trouble = /** @type {Error} */ (error).message;
  }
  redraw();
}

function list() {
  return aside(
    { class: "chats", "aria-label": "Chats" },
    button({ type: "button", class: "first", onclick: begin }, "New chat"),
    ul(
      chats.map((each) =>
        li(
          { key: each.id },
          button({ type: "button", class: "title", "aria-current": each === chat ? true : null, onclick: () => choose(each) }, each.title),
          button({ type: "button", class: "quiet", "aria-label": `Delete ${each.title}`, onclick: () => remove(each) }, "×"),
        ),
      ),
    ),
    p({ class: "hint" }, "Saved in this browser only."),
  );
}

function bar() {
  const { settings, turns } = chat;
  const none = !turns.length;
  const names = [settings.model || "default model", settings.second].filter(Boolean).join(" and ");
  const toggle = () => {
    isSetting = !isSetting;
    redraw();
  };
  return div(
    { class: "bar" },
    p(b(names)),
    div(
      { class: "buttons" },
      button({ type: "button", "aria-expanded": isSetting, onclick: toggle }, "Settings"),
      button({ type: "button", disabled: none, onclick: exportJson }, "Export JSON"),
      button({ type: "button", disabled: none, onclick: copyCurl }, isCopied ? "Copied" : "Copy as curl"),
    ),
  );
}

function exportJson() {
  saveFile(new Blob([JSON.stringify(chat, null, 2)], { type: "application/json" }), "brigade-chat.json");
}

async function copyCurl() {
  try {
    await navigator.clipboard.writeText(curlOf(bodyOf(chat, chat.turns.length - 1, chat.settings.model)));
    isCopied = true;
  } catch (error) {
    trouble = `The command was not copied: ${/** @type {Error} */ (error).message}`;
  }
  redraw();
  setTimeout(() => {
    isCopied = false;
    redraw();
  }, COPIED_MILLISECONDS);
}

function turns() {
  if (!chat.turns.length) {
    return div(
      { class: "turns" },
      p({ class: "empty" }, b("Ask the model something."), br(), "Choose an adapter, sampling and tools under Settings. Two models can answer side by side."),
    );
  }
  return div(
    {
      key: chat.id,
      class: "turns",
      tabindex: 0,
      role: "group",
      "aria-label": "Messages",
      onscroll: (/** @type {any} */ { target }) => {
        isFollowed = target.scrollHeight - target.scrollTop - target.clientHeight < NEAR_END_PIXELS;
      },
      drawn: (/** @type {Element} */ element) => {
        if (isFollowed) element.scrollTop = element.scrollHeight;
      },
    },
    chat.turns.map(turnView),
  );
}

/** @param {Turn} turn @param {number} number */
function turnView({ question, answers }, number) {
  const isBusy = answers.some((answer) => answer.state === "running");
  const [first] = answers;
  const isOpen = number === chat.turns.length - 1 && first?.state === "done" && first.calls.length > 0;
  return article(
    { key: number, class: "turn" },
    div(
      { class: "question" },
      question && p(question),
      !isBusy && p(
        { class: "actions" },
        question && button({ type: "button", class: "quiet", onclick: () => edit(number) }, "Edit"),
        button({ type: "button", class: "quiet", onclick: () => answerAgain(number) }, "Retry"),
      ),
    ),
    div({ class: `answers n${answers.length}`, "aria-busy": isBusy }, answers.map((answer) => answerView(answer, answers.length > 1))),
    isOpen && results(first.calls),
  );
}

/** The form for the results of the calls in the latest answer. @param {Call[]} calls */
function results(calls) {
  /** @param {SubmitEvent} event */
  const onsubmit = (event) => {
    event.preventDefault();
    const entered = new FormData(/** @type {HTMLFormElement} */ (event.target)).getAll("result");
    calls.forEach((call, number) => (call.result = String(entered[number])));
    continueWith("");
  };
  return form(
    { class: "results", onsubmit },
    calls.map(({ name }) => label(`Result of ${name}`, textarea({ name: "result", rows: 2, required: true }))),
    button({ type: "submit", class: "first" }, "Send results"),
  );
}

function composer() {
  const running = asked.get(chat);
  /** @param {KeyboardEvent} event */
  const onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) send();
  };
  /** @param {Event} event */
  const onsubmit = (event) => {
    event.preventDefault();
    send();
  };
  return form(
    { class: "composer", onsubmit },
    label({ class: "unseen", for: "question" }, "Question"),
    textarea({
      id: "question",
      rows: 2,
      placeholder: phone.matches ? "Ask something" : "Enter to send, Shift+Enter for a new line",
      value: draft,
      oninput: (/** @type {any} */ { target }) => setDraft(target.value),
      onkeydown,
    }),
    running
      ? button({ key: "stop", type: "button", class: "danger", onclick: () => running.abort() }, "Stop")
      : button({ key: "send", type: "submit", class: "first", disabled: !draft.trim() }, "Send"),
  );
}

/** @param {string} text */
function setDraft(text) {
  draft = text;
  redraw();
}

// --- questions and answers

function send() {
  const question = draft.trim();
  if (!question) return;
  setDraft("");
  continueWith(question);
}

/** @param {string} question is empty after results of calls */
function continueWith(question) {
  chat.turns.push({ question, answers: [] });
  if (chat.turns.length === 1) chat.title = question.slice(0, 60);
  isFollowed = true;
  void answer(chat, chat.turns.length - 1);
}

/** @param {number} number */
function edit(number) {
  setDraft(chat.turns[number].question);
  chat.turns.splice(number);
  save();
  document.getElementById("question")?.focus();
}

/** @param {number} number */
function answerAgain(number) {
  chat.turns.splice(number + 1);
  void answer(chat, number);
}

/** @param {Chat} own @param {number} number */
async function answer(own, number) {
  const stopping = new AbortController();
  const { model, second } = own.settings;
  const turn = own.turns[number];
  trouble = "";
  asked.set(own, stopping);
  try {
    const names = second ? [model, second] : [model];
    const bodies = names.map((name) => bodyOf(own, number, name));
    turn.answers = names.map(emptyAnswer);
    save();
    await Promise.all(bodies.map((body, place) => ask(body, turn.answers[place], stopping.signal, redraw)));
    announce(turn.answers.map(ending).join(" "));
  } catch (error) {
    trouble = /** @type {Error} */ (error).message;
  }
  asked.delete(own);
  save();
}

/** How an answer ended, in words. @param {Answer} answer */
function ending({ state: ended, error }) {
  if (ended === "failed") return `The answer failed: ${error}`;
  return ended === "stopped" ? "The answer was stopped." : "The answer is complete.";
}
