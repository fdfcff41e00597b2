/** The types of the frames of /admin/events. */

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

export interface Frame {
  kind: "state" | "change";
  time: number;
  spans: SpanRow[];
  server?: ServerInfo;
  cluster?: Cluster;
  stages?: Stage[];
  pipeline?: Pipeline;
  requests?: RunningRequest[];
  num_requests?: number;
  adapters?: Adapter[];
  default?: string;
  sample?: SampleRow | null;
  history?: SampleRow[];
}
