/** A chat for trying the model and its adapters. */
import { call } from "../lib/api.js";
import { ask, bodyOf } from "../lib/asking.js";
import { begin, chat, emptyAnswer, save } from "../lib/chats.js";
import { h, redraw } from "../lib/dom.js";
import { attempt, state } from "../lib/store.js";
import { answerView } from "./chat_answer.js";
import { chatSettings } from "./chat_settings.js";

/** @import { Turn } from "../lib/types.d.ts" */

const phone = matchMedia("(max-width: 760px), (pointer: coarse)");

/** What stops the running answers. @type {AbortController | null} */
let running = null;
let models = /** @type {string[]} */ ([]);
let listedFor = ""; // the adapters for which the models were listed
let draft = "";
let isSetting = false;

export function chatView() {
  const names = `of ${state.adapters.map(({ name }) => name).join("\n")}`;
  if (names !== listedFor) void attempt("list the models", listModels);
  listedFor = names;
  return [
    h.h1({ class: "unseen" }, "Chat"),
    h.section({ class: "chat", "aria-label": "Conversation" }, bar(), isSetting && chatSettings(models), turns(), composer()),
  ];
}

async function listModels() {
  const listed = await (await call("v1/models")).json();
  models = listed.data.map((/** @type {{id: string}} */ { id }) => id);
}

function bar() {
  const { settings, turns } = chat;
  const toggle = () => {
    isSetting = !isSetting;
    redraw();
  };
  return h.div(
    { class: "tools" },
    h.b([settings.model || "default model", settings.second].filter(Boolean).join(" and ")),
    h.div(
      { class: "buttons" },
      h.button({ "aria-expanded": isSetting, onclick: toggle }, "Settings"),
      h.button({ disabled: !turns.length, onclick: beginAgain }, "New chat"),
    ),
  );
}

function beginAgain() {
  running?.abort();
  begin();
}

function turns() {
  if (!chat.turns.length) {
    return h.div(
      { class: "turns" },
      h.p(
        { class: "empty" },
        h.b("Ask the model something."), h.br(),
        "Choose an adapter and sampling under Settings. Two models can answer side by side.", h.br(),
        "The chat is saved in this browser only.",
      ),
    );
  }
  return h.div({ key: "turns", class: "turns", tabindex: 0, role: "log", "aria-label": "Messages" }, h.div(chat.turns.map(turnView)));
}

/** @param {Turn} turn @param {number} number */
function turnView({ question, answers }, number) {
  const isBusy = answers.some((answer) => answer.state === "running");
  return h.article(
    { key: number, class: "turn" },
    h.p({ class: "question" }, question),
    !isBusy && h.p({ class: "actions" }, h.button({ class: "quiet", onclick: () => answerAgain(number) }, "Retry")),
    h.div({ class: "answers", "aria-busy": isBusy }, answers.map((answer) => answerView(answer, answers.length > 1))),
  );
}

function composer() {
  return h.form(
    { class: "composer", onsubmit: send },
    h.label({ class: "unseen", for: "question" }, "Question"),
    h.textarea({
      id: "question",
      rows: 2,
      placeholder: phone.matches ? "Ask something" : "Enter to send, Shift+Enter for a new line",
      value: draft,
      oninput: ({ target }) => setDraft(target.value),
      onkeydown: (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
      },
    }),
    running
      ? h.button({ key: "stop", type: "button", class: "danger", onclick: () => running?.abort() }, "Stop")
      : h.button({ key: "send", type: "submit", class: "first", disabled: !draft.trim() }, "Send"),
  );
}

/** @param {string} text */
function setDraft(text) {
  draft = text;
  redraw();
}

// --- questions and answers

/** @param {Event} event */
function send(event) {
  event.preventDefault();
  const question = draft.trim();
  if (!question || running) return;
  setDraft("");
  chat.turns.push({ question, answers: [] });
  document.querySelector(".turns")?.scrollTo(0, 0);
  void answer(chat.turns.length - 1);
}

/** @param {number} number */
function answerAgain(number) {
  running?.abort();
  chat.turns.splice(number + 1);
  void answer(number);
}

/** @param {number} number */
async function answer(number) {
  const own = chat;
  const stopping = new AbortController();
  const { model, second } = own.settings;
  const answers = (second ? [model, second] : [model]).map(emptyAnswer);
  own.turns[number].answers = answers;
  running = stopping;
  save();
  await Promise.all(answers.map((each) => ask(bodyOf(own, number, each.model), each, stopping.signal, redraw)));
  if (running === stopping) running = null;
  save();
}
