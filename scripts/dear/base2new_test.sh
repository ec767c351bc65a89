#!/usr/bin/env bash
# Test what base2new_train.sh trained on the new classes. Same arguments.
source "$(dirname "$0")/common.sh"
parse_call "$@"
EXTRA=(--eval-only)
if [ "$TRAINER" != ZeroshotCLIP ]; then EXTRA+=(--model-dir "$(output_folder base2new/train_base)"); fi
run_train "$(output_folder base2new/test_new)" new "${EXTRA[@]}"
