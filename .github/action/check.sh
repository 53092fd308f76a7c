#!/usr/bin/env bash
# The step "Check" of the action: annotations in the log, a table in the summary of the job, and
# SARIF in a file. The exit code is that of `jaxprtool check`.
#
#   CHECK_DIRECTORY   the folder to check
#   CHECK_TARGETS     the names of the targets, separated by spaces; all if empty
#   CHECK_SARIF       the file for SARIF, from the folder that the job runs in; none if empty
set -euo pipefail

sarif=${CHECK_SARIF:+$(realpath -m -- "$CHECK_SARIF")}
read -r -a targets <<<"${CHECK_TARGETS:-}"
cd -- "${CHECK_DIRECTORY:-.}"

# check FORMAT: 0 and 1 are results, and any other exit code is an error.
check() {
    python -m jaxprtool check --format "$1" ${targets[@]+"${targets[@]}"}
}

status=0
check github || status=$?
((status <= 1)) || exit "$status"

if [[ -n ${GITHUB_STEP_SUMMARY:-} ]]; then
    {
        echo '```text'
        check text || true
        echo '```'
    } >>"$GITHUB_STEP_SUMMARY"
fi

if [[ -n $sarif ]]; then
    check sarif >"$sarif" 2>/dev/null || true
    echo "sarif=$sarif" >>"${GITHUB_OUTPUT:-/dev/null}"
fi

exit "$status"
