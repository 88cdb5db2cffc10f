"""Command line of the traffic driver: a number while it runs, one JSON line at the end."""

import argparse
import asyncio
import json
import signal

from e2e.traffic.driver import Load, Tally, run

TELL_EVERY_S = 0.5


async def _main(load: Load) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tally = Tally()
    driving = asyncio.create_task(run(load, stop, tally))
    while not (await asyncio.wait([driving], timeout=TELL_EVERY_S))[0]:
        print(tally.ended, flush=True)
    driving.result()
    print(json.dumps(tally.as_dict()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m e2e.traffic", description=__doc__)
    parser.add_argument("--url", required=True, help="base address of the service, without /v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two requests of one client")
    parser.add_argument("--prompt-words", type=int, default=40, help="prompts have up to so many words")
    parser.add_argument("--reconnects", type=int, default=0, help="new tries when no connection could be made")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    asyncio.run(
        _main(
            Load(
                url=args.url.rstrip("/"),
                model=args.model,
                concurrency=args.concurrency,
                count=args.count,
                seconds=args.seconds,
                pause_s=args.pause,
                prompt_words=args.prompt_words,
                reconnects=args.reconnects,
                seed=args.seed,
            )
        )
    )


if __name__ == "__main__":
    main()
