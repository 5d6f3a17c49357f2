"""The demonstration's conversation: what the user asks, which tools the model calls, and what they answer. Deterministic."""

from __future__ import annotations

import json
from dataclasses import dataclass

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"} for argument in arguments},
                "required": list(arguments),
            },
        },
    }
    for name, description, arguments in (
        ("read_file", "Read a file of the repository.", ("path",)),
        ("search", "Search the repository for a text.", ("pattern",)),
        ("edit_file", "Replace a file's content.", ("path", "content")),
        ("run_tests", "Run the test suite.", ("target",)),
        ("update_plan", "Write down the plan.", ("plan",)),
    )
]

SYSTEM = "You are a coding agent in the repository of a web shop. Work in small steps, read before you edit, and run the tests."

ASKS = (
    "Orders placed around midnight get yesterday's exchange rate. Find out why and fix it. "
    "Never touch anything under migrations/, and keep the public API of shop.rates as it is.",
    "Good. Now the same for refunds: they must use the rate of the original order, not today's.",
    "Last thing: add a regression test for both, and tell me which files you changed.",
)

MODULES = ("rates", "orders", "refunds", "clock", "ledger", "currency", "cache", "settings", "jobs", "reports")


@dataclass(frozen=True, slots=True)
class Step:
    """One answer of the model: a tool call, or the closing words of a turn."""

    tool: str = ""
    arguments: str = ""
    text: str = ""


def steps(turn: int) -> tuple[Step, ...]:
    """What the model does in a turn: a plan, a dozen tool calls, an answer."""
    plan = json.dumps({"plan": f"1. find the cause 2. fix it 3. run the tests (request {turn + 1})"})
    made: list[Step] = [Step("update_plan", plan)]
    for number in range(12):
        module = MODULES[(turn * 5 + number) % len(MODULES)]
        path = f"shop/{module}.py"
        if number % 6 == 4:
            made.append(Step("edit_file", json.dumps({"path": path, "content": source(module, turn, fixed=True)})))
        elif number % 6 == 5:
            made.append(Step("run_tests", json.dumps({"target": f"tests/test_{module}.py"})))
        elif number % 3 == 2:
            made.append(Step("search", json.dumps({"pattern": f"def {module}_at"})))
        else:
            made.append(Step("read_file", json.dumps({"path": path})))
    made.append(Step(text=CLOSING[turn]))
    return tuple(made)


CLOSING = (
    "The cache key in shop/rates.py was the local date, so it rolled over an hour late. It is the UTC date now; the tests pass.",
    "Refunds read the rate from the order's ledger entry LE-20417 now; shop/refunds.py changed, migrations/ is untouched.",
    "Changed: shop/rates.py, shop/refunds.py, tests/test_rates.py. Both regressions are covered.",
)


def run_tool(name: str, arguments: str, turn: int) -> str:
    """What a tool answers."""
    given = json.loads(arguments)
    if name == "read_file":
        return source(given["path"].removeprefix("shop/").removesuffix(".py"), turn)
    if name == "search":
        return "\n".join(
            f"shop/{module}.py:{10 + 7 * at}: def {module}_at(moment: datetime, currency: str) -> Decimal:  # RATE-{4100 + at}"
            for at, module in enumerate(MODULES)
        )
    if name == "run_tests":
        lines = [f"{given['target']}::test_case_{at:02d} PASSED" for at in range(40)]
        return "\n".join([*lines, "40 passed in 1.84s"])
    return "ok"


def source(module: str, turn: int, *, fixed: bool = False) -> str:
    """A plausible Python file of about 900 tokens."""
    zone = "UTC" if fixed else "local time"
    functions = [
        f'''def {module}_{verb}(moment: datetime, currency: str = "EUR") -> Decimal:
    """{verb.title()} a {module} entry; the day is a day of {zone}."""
    key = ({module.upper()}_PREFIX, moment.astimezone({"timezone.utc" if fixed else "None"}).date(), currency)
    entry = CACHE.get(key) or load_{module}(key, timeout={200 + 10 * at + turn})
    if entry.status is Status.EXPIRED:
        raise {module.title()}Error(f"no {module} for {{key}}: code {4000 + 17 * at}")
    return entry.value.quantize(Decimal("0.0001"))
'''
        for at, verb in enumerate(("read", "write", "at", "refresh", "audit", "expire"))
    ]
    return (
        f"from datetime import datetime, timezone\nfrom decimal import Decimal\n\n{module.upper()}_PREFIX = '{module}:v2'\n\n\n"
        + ("\n\n".join(functions))
    )


SUMMARY = """\
## Goal
Orders placed around midnight must use the right exchange rate; later requests extend this to refunds and regression tests.
## Constraints
Never touch anything under migrations/. Keep the public API of shop.rates as it is.
## Decisions
The day of a rate is a UTC day.
## State
Cause found in shop/rates.py (cache key by local date). Fix written, tests run.
## Artifacts
shop/rates.py, shop/orders.py and shop/clock.py were read; shop/rates.py was edited.
## Next steps
Go on with the newest request."""
