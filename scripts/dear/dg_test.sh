#!/usr/bin/env bash
# Test what xd_train.sh trained in another domain. Example: bash scripts/dear/dg_test.sh imagenet_a 1
PROTOCOL=dg
source "$(dirname "$0")/common.sh"
test_transfer "$@"
