#!/usr/bin/env bash
# PROTOCOL DATASET SEED [flags of scripts/run_protocol.py]: a whole protocol for one data set and seed.
if [ $# -lt 3 ]; then echo "usage: bash $0 PROTOCOL DATASET SEED [flags of scripts/run_protocol.py]" >&2; exit 2; fi
source "$(dirname "$0")/common.sh"
PROTOCOL=$1 DATASET=$2 SEED=$3
shift 3
exec "$PYTHON" scripts/run_protocol.py "$PROTOCOL" --dataset "$DATASET" --seeds "$SEED" --data "$DATA" "$@"
