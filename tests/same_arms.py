"""Two identical arms, compared again and again: how often is a difference claimed that is none?

    python tests/same_arms.py [RUNS]

Prints a line per run and the count. Of 20 runs at least 16 must find no difference.
"""

import sys

from test_bench_effect import compared, participant

N_RUNS = 20
N_ROUNDS = 6


def main() -> None:
    n_runs = int(sys.argv[1]) if len(sys.argv) > 1 else N_RUNS
    n_none = 0
    for number in range(n_runs):
        answer = compared([participant("plain", 0), participant("slow", 0)], N_ROUNDS, number + 1)
        (found,) = answer.claims[0].findings
        n_none += found.verdict == "none"
        print(f"run {number + 1}: {answer.headline}", flush=True)
    print(f"no difference found in {n_none} of {n_runs} runs")


if __name__ == "__main__":
    main()
