#!/usr/bin/env bash
# agent.sh ADDRESS COMMAND…: runs a command on one of the two "hosts", as ssh does for mpirun
case $1 in *.2) host=second core=1 ;; *) host=first core=0 ;; esac
shift
exec ip netns exec $host chrt -f 5 taskset -c $core unshare --uts bash -c "hostname $host; $*"
