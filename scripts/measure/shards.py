"""Two shards beside the other layouts of two ranks, one rank and mlx_lm.server."""

from typing import Any

from scripts.measure import servers
from scripts.measure.clients import Asked, ask_in_turn, pipeline
from scripts.measure.curve import Runs, put_load, summed_up
from scripts.measure.latency import LONG_TOKENS, long_prompt_seconds
from scripts.measure.rounds import Row, Samples, Settings

# Two ranks have two layouts, so the layout that --tensor-parallel-size auto chooses is measured
# beside every one that a person could choose.
SERVERS = (
    servers.SHARDS_2,
    servers.BRIGADE_2,
    servers.AUTO_2,
    servers.BRIGADE_1,
    servers.MLX_LM_1,
)


def shards(settings: Settings) -> Row:
    """The curve, a long prompt alone, and the share of a step that sums between shards take."""
    runs: Runs = {}
    first_tokens = Samples(*SERVERS)
    sum_shares: list[float] = []
    layouts: list[int] = []  # the numbers of shards that auto has chosen

    async def ask(asked: Asked, name: str, round_: int) -> None:
        for clients in settings.levels:
            run = await put_load(settings, asked.url, name, clients, round_)
            runs.setdefault((name, clients), []).append(run)
        first_tokens.add(name, *await long_prompt_seconds(asked, round_))
        if name == servers.AUTO_2:
            layouts.append(pipeline(asked.url)["tensor_parallel"])
        if name == servers.SHARDS_2:
            sums: dict[str, Any] = pipeline(asked.url)["stages"][0]["all_reduce"]
            sum_shares.append(sums["seconds"] / sums["step_seconds"])

    ask_in_turn(settings, SERVERS, ask)
    data, tables = summed_up(settings, runs, servers.SHARDS_2, SERVERS)
    title = f"time to first token of {LONG_TOKENS} tokens, s"
    others = [(servers.SHARDS_2, other) for other in SERVERS[1:]]
    first = first_tokens.row("first_tokens", title, *others)
    tables |= first.tables
    shares = [[f"{share:.0%}", chosen] for share, chosen in zip(sum_shares, layouts, strict=False)]
    tables["each round"] = ["sums' share of a step", "shards that auto chose"], shares
    data_of_all = {"curve": data, "sum_shares": sum_shares, "layouts": layouts, **first.data}
    return Row({"shards": data_of_all}, tables)
