#!/usr/bin/env bash
# All tests, kind by kind: unit (no services), contract (vLLM's seams), integration (a real Redis), e2e (real engines).
# Arguments go to pytest instead: infra/test.sh tests/unit -k settings
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

(($#)) && exec .venv/bin/python -m pytest "$@"
verdict=0
for kind in unit contract integration e2e; do
    echo "test: $kind"
    began=$SECONDS
    .venv/bin/python -m pytest --durations 5 "tests/$kind" || verdict=1
    echo "test: $kind took $((SECONDS - began)) s"
done
echo "test: all took $SECONDS s"
exit $verdict
