#!/usr/bin/env bash
# Runs README's commands where nothing was ever installed: in a Debian of its own that holds Python,
# make and git alone, in a clone of HEAD, with an empty home and no environment. As root:
#   tests/fresh.sh FOLDER [COMMAND]   FOLDER is kept, so that the second call starts at once
#   AS=root|user  DEBIAN=bookworm  BIND="files and folders that pip's configuration names"
set -eu
cd "${0%/*}/.."
command=${2:-make run TP=2 MODE=ssd && make check && make test}
user=${AS:-root} root=$(realpath -m "$1")/${DEBIAN:-bookworm}
if [ ! -e "$root/home/user" ]; then
    debootstrap --variant=minbase --include=ca-certificates,python3-venv,make,git \
        "${DEBIAN:-bookworm}" "$root"
    chroot "$root" useradd -m user
fi
home=$root/home/$user
rm -rf "$home"
mkdir -p "$home"
git clone -q --no-local . "$home/mpissd"
chroot "$root" chown -R "$user" "/home/$user"
cp /etc/resolv.conf "$root/etc"
mapfile -t kept < <(env | grep -E '^PIP_|_proxy=')
export root user BIND
exec unshare --mount --pid --fork --kill-child bash -euc '
    for path in ${BIND:-}; do
        [ -d "$path" ] && mkdir -p "$root$path" || { mkdir -p "$root${path%/*}"; touch "$root$path"; }
        mount --bind -o ro "$path" "$root$path"
    done
    mount -t proc none "$root/proc"
    mount -t tmpfs none "$root/tmp" # what an earlier call left there has the names of its processes
    mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"
    exec chroot --userspec="$user" "$root" env -i HOME="/home/$user" PATH=/usr/bin:/bin "${@:2}" \
        sh -c "cd ~/mpissd && $1"' bash "$command" ${kept[@]+"${kept[@]}"} </dev/null
