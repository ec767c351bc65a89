#!/usr/bin/env bash
# Train on the base classes and test on them. Example: DATA=/data bash scripts/dear/base2new_train.sh caltech101 1 --trainer CoOp
source "$(dirname "$0")/common.sh"
parse_call "$@"
EXTRA=()
if [ "$TRAINER" = ZeroshotCLIP ]; then EXTRA+=(--eval-only); fi  # nothing to train
run_train "$(output_folder base2new/train_base)" base ${EXTRA[@]+"${EXTRA[@]}"}
