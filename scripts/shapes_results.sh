#!/usr/bin/env bash
# Every trainer on shapes in every protocol, seeds 1-3, and the tables into results/shapes_<protocol>.md; hours on 2 cores.
#   bash scripts/shapes_results.sh [flags of scripts/run_protocol.py, e.g. --jobs 2]
# A second call goes on where the first one stopped. TRAINERS, SEEDS, PROTOCOLS, DATA, OUTPUT, RESULTS narrow it or move it.
set -euo pipefail
source "$(dirname "$0")/dear/common.sh"
if [ -z "${TRAINERS:-}" ]; then TRAINERS=$(printf '%s\n' configs/trainers/*/tiny.yaml | cut -d/ -f3 | tr '\n' ' '); fi
SEEDS=${SEEDS:-1 2 3} OUTPUT=${OUTPUT:-output} RESULTS=${RESULTS:-results}
PROTOCOLS=${PROTOCOLS:-base2new xd dg fewshot ablation} failed=()
for protocol in $PROTOCOLS; do
  trainers=$TRAINERS
  if [ "$protocol" = ablation ]; then trainers=DeAR; fi  # it is about DeAR's parts
  # shellcheck disable=SC2086 - the lists are split on purpose
  "$PYTHON" scripts/run_protocol.py "$protocol" --trainer $trainers --dataset shapes --seeds $SEEDS --data "$DATA" \
    --output "$OUTPUT" --resume "$@" || failed+=("$protocol")
done
for protocol in $PROTOCOLS; do  # last, since a new table is a change of the tree, which every run records
  table=$(mktemp)
  if "$PYTHON" scripts/report.py "$OUTPUT" --protocol "$protocol" --markdown "$table" --plots "$OUTPUT/plots"; then
    mkdir -p "$RESULTS"
    { printf '# shapes, %s\n\nMade by `bash scripts/shapes_results.sh`, seeds %s.\n\n' "$protocol" "$SEEDS"
      cat "$table"; } > "$RESULTS/shapes_$protocol.md"
  fi
  rm -f "$table"
done
if [ ${#failed[@]} -gt 0 ]; then echo "not all runs finished: ${failed[*]}" >&2; exit 1; fi
