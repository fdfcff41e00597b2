/** The types of the page. Browsers do not fetch this file. */

import type { Description } from "./dom.js";

// --- elements

export type Props = Record<string, any>;
export type Child = Node | Description | string | number | boolean | null | undefined | Child[];

// --- the frames of /admin/events

export interface Stage {
  rank: number;
  stage: number | null;
  shard: number | null;
  host: string;
  layers: [number, number] | null;
  state: string;
  bytes_done: number;
  bytes_total: number;
  bytes_owned: number;
  bytes_fetched: number;
  busy_share: number;
  decode_seconds: number | null;
  kv_bytes: number;
  adapter_bytes: number;
  num_hops: number;
  hop_seconds: number;
}

export interface RunningRequest {
  id: string;
  client: string | null;
  path: string;
  model: string;
  adapter_version: number | null;
  state: "waiting" | "prefill" | "decode";
  prompt_tokens: number;
  prompt_tokens_done: number;
  cached_tokens: number;
  completion_tokens: number;
  age_seconds: number;
  ttft_seconds: number | null;
  sequences: number[];
}

export interface Adapter {
  name: string;
  version: number | null;
  rank: number;
  bytes: number[];
  num_running: number;
  loaded_at: number;
  source: string;
  pinned: boolean;
}

export interface Cluster {
  name: string;
  what: string;
  reason: string | null;
  has_worked: boolean;
  missing: number[];
  fault: string | null;
  fault_seconds_ago: number | null;
}

export interface Pipeline {
  model: string;
  num_ranks: number;
  tensor_parallel: number;
  num_running: number;
  num_waiting: number;
  kv_tokens: number;
  max_kv_tokens: number | null;
  better_split: number[] | null;
  num_restarts: number;
  recovery_seconds: number;
}

export interface ServerInfo {
  version: string;
  model: string;
  max_context: number | null;
  max_num_sequences: number;
  is_draining: boolean;
  /** Where adapters may be loaded from: folder, hub. */
  adapter_sources: string[];
}

/** Rank, step, kind, rows, tokens, start and end in seconds, sequences. */
export type SpanRow = [number, number, "prefill" | "decode", number, number, number, number, number[]];

/** The time in seconds, tokens per second, seconds to the first and to the next token, requests that
 * run and that wait, the share of the KV cache in use, and of the prompt tokens that were cached. */
export type SampleRow = [number, number, number | null, number | null, number, number, number | null, number | null];

/** What the server says: each section is sent when it has changed. */
export interface Sections {
  server: ServerInfo | null;
  cluster: Cluster | null;
  stages: Stage[];
  pipeline: Pipeline | null;
  /** The oldest requests; num_requests counts all. */
  requests: RunningRequest[];
  num_requests: number;
  adapters: Adapter[];
  default: string;
}

export interface Frame extends Partial<Sections> {
  kind: "state" | "change";
  time: number;
  spans: SpanRow[];
  sample?: SampleRow | null;
  history?: SampleRow[];
}

/** The part of the time that the lanes show, in seconds; the width is pixels. */
export interface Window {
  from: number;
  to: number;
  width: number;
  ranks: number[];
}

// --- the chat

export interface Token {
  token: string;
  logprob: number;
  top_logprobs: { token: string; logprob: number }[];
}

export interface Call {
  id: string;
  name: string;
  arguments: string;
  result?: string;
}

export interface Answer {
  model: string;
  /** The id of its request. */
  request: string;
  text: string;
  reasoning: string;
  calls: Call[];
  tokens: Token[];
  state: "running" | "done" | "stopped" | "failed";
  error: string;
  finish: string;
  prompt: { done: number; total: number } | null;
  speed: { count: number; first: number | null; seconds: number; cached: number };
}

/** A question has the answers of one or two models; the chat continues from the first one. The
 * question is empty after results of calls, which are kept with the calls. */
export interface Turn {
  question: string;
  answers: Answer[];
}

export interface Settings {
  model: string;
  second: string;
  system: string;
  temperature: string;
  top_p: string;
  max_tokens: string;
  seed: string;
  tools: string;
  schema: string;
  logprobs: boolean;
}

export interface Chat {
  id: string;
  title: string;
  turns: Turn[];
  settings: Settings;
}
