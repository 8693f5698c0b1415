#!/bin/sh
# Plays the programs of scripts/release under their names: appends the words of each call to the file RECORD, and answers as
# far as the script reads the answer. As `peerpod` it is the real one.
name=${0##*/}
[ "$name" != peerpod ] || exec "$PEERPOD" "$@"
echo "$name $*" >>"$RECORD"
case "$name $*" in
"docker save "*) echo layers ;;
"docker buildx imagetools inspect "*) echo sha256:of-the-image ;;
"helm push "*) echo "Digest: ${CHART_DIGEST-sha256:of-the-chart}" ;;
esac
