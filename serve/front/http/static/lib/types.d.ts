/** The types of the page. Browsers do not fetch this file. */

import type { Description } from "./dom.js";

// --- elements

export interface Props {
  [handler: `on${string}`]: ((event: any) => unknown) | null | undefined;
  [name: string]: any;
}
export type Child = Node | Description | string | number | boolean | null | undefined | Child[];

// --- the frames of /admin/events

export interface Stage {
  rank: number;
  shard: number | null;
  host: string;
  layers: [number, number] | null;
  state: string;
  bytes_done: number;
  bytes_total: number;
  bytes_owned: number;
  decode_seconds: number | null;
  kv_bytes: number;
  adapter_bytes: number;
  memory: Record<string, number> | null;
  num_hops: number;
  hop_seconds: number;
}

export interface RunningRequest {
  id: string;
  client: string | null;
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
  tensor_parallel: number;
  num_running: number;
  num_waiting: number;
  kv_tokens: number;
  max_kv_tokens: number | null;
  better_split: number[] | null;
  num_restarts: number;
}

export interface ServerInfo {
  model: string;
  max_num_sequences: number;
  is_draining: boolean;
  /** Where adapters may be loaded from: folder, hub. */
  adapter_sources: string[];
}

/** Rank, step, kind, rows, tokens, start and end in seconds, sequences. */
export type SpanRow = [number, number, "prefill" | "decode", number, number, number, number, number[]];

export interface Span {
  step: number;
  kind: "prefill" | "decode";
  rows: number;
  tokens: number;
  start: number;
  end: number;
  sequences: number[];
}

/** The values of a sample, in the order of SAMPLE in store.js. */
export type SampleRow = (number | null)[];

/** The time in seconds, tokens per second, seconds to the first and to the next token, requests that
 * run and that wait, the share of the KV cache in use, and of the prompt tokens that were cached. */
export type Measure = "time" | "rate" | "first" | "next" | "running" | "waiting" | "kv" | "cached";
export type Sample = Record<Measure, number | null> & { time: number };

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

export interface Answer {
  model: string;
  text: string;
  reasoning: string;
  state: "running" | "done" | "stopped" | "failed";
  error: string;
  finish: string;
  prompt: { done: number; total: number } | null;
  speed: { count: number; first: number | null; seconds: number; cached: number };
}

/** A question has the answers of one or two models; the chat continues from the first one. */
export interface Turn {
  question: string;
  answers: Answer[];
}

/** Numbers as they were typed; nothing stands for the default. */
export interface Settings {
  model: string;
  second: string;
  system: string;
  temperature: string;
  top_p: string;
  max_tokens: string;
  seed: string;
}

export interface Chat {
  turns: Turn[];
  settings: Settings;
}
