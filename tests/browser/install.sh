#!/usr/bin/env bash
# Chromium for tests/integration/test_page_in_browser.py, from Debian; at once where it is there.
set -euo pipefail
command -v chromium >/dev/null && exit 0
if [ "$(id -u)" != 0 ]; then
  echo "there is no Chromium: the tests of the page in a browser will be skipped" >&2
  exit 0
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
