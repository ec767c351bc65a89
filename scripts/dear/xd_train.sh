#!/usr/bin/env bash
# Train on all classes of the source, 16 shots; xd_test.sh and dg_test.sh test it. Example: bash scripts/dear/xd_train.sh imagenet 1
PROTOCOL=source
source "$(dirname "$0")/common.sh"
parse_call "$@"
EXTRA=()
if [ "$TRAINER" = ZeroshotCLIP ]; then EXTRA+=(--eval-only); fi  # nothing to train
run_train "$(output_folder source)" all ${EXTRA[@]+"${EXTRA[@]}"}
