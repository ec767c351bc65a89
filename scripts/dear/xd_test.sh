#!/usr/bin/env bash
# Test what xd_train.sh trained on another data set, all its classes. Example: bash scripts/dear/xd_test.sh caltech101 1
PROTOCOL=xd
source "$(dirname "$0")/common.sh"
test_transfer "$@"
