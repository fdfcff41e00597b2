// @ts-check
/**
 * What /admin/events sends.
 *
 * @typedef {object} Stage
 * @property {number} rank
 * @property {string} host
 * @property {[number, number] | null} layers
 * @property {string} state
 * @property {number} bytes_done
 * @property {number} bytes_total
 * @property {number} bytes_owned
 * @property {number} bytes_fetched
 * @property {number} busy_share
 * @property {number | null} decode_seconds
 * @property {number} kv_bytes
 * @property {number} adapter_bytes
 * @property {number} num_hops
 * @property {number} hop_seconds
 *
 * @typedef {object} RunningRequest
 * @property {string} id
 * @property {string | null} client
 * @property {string} path
 * @property {string} model
 * @property {number | null} adapter_version
 * @property {"waiting" | "prefill" | "decode"} state
 * @property {number} prompt_tokens
 * @property {number} prompt_tokens_done
 * @property {number} cached_tokens
 * @property {number} completion_tokens
 * @property {number} age_seconds
 * @property {number | null} ttft_seconds
 * @property {number[]} sequences
 *
 * @typedef {object} Adapter
 * @property {string} name
 * @property {number | null} version
 * @property {number} rank
 * @property {number[]} bytes
 * @property {number} num_running
 * @property {number} loaded_at
 * @property {string} source
 * @property {boolean} pinned
 *
 * @typedef {object} Cluster
 * @property {string} name
 * @property {string} what
 * @property {string | null} reason
 * @property {boolean} has_worked
 * @property {number[]} missing
 * @property {string | null} fault
 * @property {number | null} fault_seconds_ago
 *
 * @typedef {object} Pipeline
 * @property {string} model
 * @property {number} num_ranks
 * @property {number} num_running
 * @property {number} num_waiting
 * @property {number} kv_tokens
 * @property {number | null} max_kv_tokens
 * @property {number[] | null} better_split
 * @property {number} num_restarts
 * @property {number} recovery_seconds
 *
 * @typedef {object} ServerInfo
 * @property {string} version
 * @property {string} model
 * @property {number | null} max_context
 * @property {boolean} is_draining
 *
 * Rank, step, kind, rows, tokens, start and end in seconds, sequences.
 * @typedef {[number, number, "prefill" | "decode", number, number, number, number, number[]]} SpanRow
 *
 * @typedef {object} Frame
 * @property {"state" | "change"} kind
 * @property {number} time
 * @property {SpanRow[]} spans
 * @property {ServerInfo} [server]
 * @property {Cluster} [cluster]
 * @property {Stage[]} [stages]
 * @property {Pipeline} [pipeline]
 * @property {RunningRequest[]} [requests]
 * @property {Adapter[]} [adapters]
 * @property {string} [default]
 * @property {Record<string, number>} [totals]
 */
export {};
