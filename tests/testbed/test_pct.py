"""The testbed's pct against what docs/proxmox.md promises of the real one: the product's tests rely on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest


@pytest.fixture
def proxmox(real_proxmox):
    return real_proxmox


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return value


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("exec", "202", "--", "true"), "container '202' not running!"),
        (("exec", "203", "--", "true"), "container '203' not running!"),
        (("stop", "202"), "CT 202 not running"),
        (("shutdown", "202"), "CT 202 not running"),
        (("start", "200"), "CT 200 already running"),
        (("start", "203"), "CT is locked (backup)"),
        (("exec", "299", "--", "true"), "Configuration file 'nodes/pve/lxc/299.conf' does not exist"),
        (("status", "298"), "Configuration file 'nodes/pve/lxc/298.conf' does not exist"),
        (("start", "298"), "Configuration file 'nodes/pve/lxc/298.conf' does not exist"),
        (("push", "202", "/etc/hostname", "/root/x"), "can only push files to a running CT"),
        (("push", "298", "/etc/hostname", "/root/x"), "can only push files to a running CT"),
        (("pull", "202", "/etc/hostname", "/root/x"), "can only pull files from a running CT"),
        (("exec", "200", "python3", "-c", "pass"), "Unknown option: c\n400 unable to parse option\npct exec <vmid>"),
        (("exec", "200", "true", "--bad=1"), "Unknown option: bad"),
        (("exec", "200"), "missing command at /usr/share/perl5/PVE/CLI/pct.pm line "),
        (("exec", "200", "--"), "missing command at /usr/share/perl5/PVE/CLI/pct.pm line "),
        (("exec",), "400 not enough arguments"),
        (("status", "200", "extra"), "400 too many arguments"),
        (("status", "x"), "400 Parameter verification failed.\nvmid: type check ('integer') failed - got 'x'"),
        (("status", "99"), "400 Parameter verification failed.\nvmid: value must have a minimum value of 100"),
        (("status", "1000000000"), "vmid: value must have a maximum value of 999999999"),
        (("exec", "200", "--keep-env", "true", "--", "true"), ""),
        (("exec", "200", "--keep-env", "env", "--", "true"), "keep-env: type check ('boolean') failed - got 'env'"),
        (("nosuch",), "ERROR: unknown command 'pct nosuch'"),
        ((), "ERROR: no command specified"),
    ],
)
def test_what_pct_says_of_itself(proxmox, argv, said):
    done = proxmox.pct(*argv)
    assert said in done.stderr
    assert (done.returncode == 0) == (said == "")
    assert done.stdout == ""
    assert proxmox.calls() == [list(argv)]


def test_old_versions_put_error_before_it_and_any_code_comes_back(proxmox):
    with proxmox.knobs(prefix="Error: ", failure_code=25):
        done = proxmox.pct("exec", "202", "--", "true")
    assert (done.stderr, done.returncode) == ("Error: container '202' not running!\n", 25)


def test_only_root_may(proxmox):
    done = proxmox.pct("status", "200", user="ops")
    assert (done.stderr, done.returncode) == ("please run as root\n", 255)
    assert proxmox.ssh("sudo -n /usr/sbin/pct status 200", "ops").stdout == "status: running\n"
    assert proxmox.ssh("sudo -n /usr/sbin/pct status 200", "guest").stderr == "sudo: a password is required\n"
    assert proxmox.ssh("sudo -n /usr/bin/id", "ops").stderr == "sudo: a password is required\n"


def test_a_path_without_sbin_has_no_pct(proxmox):
    assert proxmox.ssh("pct status 200", "ops").stderr == "bash: line 1: pct: command not found\n"
    assert "No such file or directory" in proxmox.ssh("/usr/sbin/nosuch status 200").stderr


def test_states(proxmox):
    listed = [line.split() for line in proxmox.pct("list").stdout.splitlines()]
    assert listed == [
        ["VMID", "Status", "Lock", "Name"],
        ["200", "running", "ct200"],
        ["201", "running", "ct201"],
        ["202", "stopped", "ct202"],
        ["203", "stopped", "backup", "ct203"],
    ]
    assert "lock: backup\n" in proxmox.pct("config", "203").stdout
    assert "unprivileged: 1\n" in proxmox.pct("config", "201").stdout
    assert "lock" not in proxmox.pct("config", "200").stdout
    proxmox.lock("200", "snapshot")
    assert proxmox.pct("stop", "200").stderr == "CT is locked (snapshot)\n"
    assert proxmox.pct("exec", "200", "--", "true").returncode == 0


def test_arguments_reach_the_command_unchanged_and_no_shell_reads_them(proxmox):
    odd = ["$HOME", "`id`", "a b", "'", '"', "-x", "--", "", "a\nb", "*", ";", "\\"]
    script = "import json, sys; print(json.dumps(sys.argv[1:]))"
    done = proxmox.pct("exec", "200", "--", "/usr/bin/python3", "-c", script, *odd)
    assert json.loads(done.stdout) == odd


def test_what_is_not_ascii_dies_in_a_c_locale(proxmox):
    environment = {"PATH": "/usr/sbin:/usr/bin"}
    assert proxmox.pct("exec", "200", "--", "echo", "häh", env=environment).stdout == "h??h\n"
    assert proxmox.pct("exec", "200", "--", "echo", "häh", env={**environment, "LANG": "C.UTF-8"}).stdout == "häh\n"


def test_one_argument_is_at_most_128_kib(proxmox):
    assert proxmox.pct("exec", "200", "--", "echo", "x" * 131000).returncode == 0
    assert "Argument list too long" in proxmox.ssh("/usr/sbin/pct exec 200 -- echo $(printf %0131073d 1)").stderr


@pytest.mark.parametrize("ct", ["200", "201"])
def test_stdin_is_binary_clean(proxmox, ct):
    data = bytes(range(256)) * 4096
    done = proxmox.pct("exec", ct, "--", "cat", input=data, text=False)
    assert done.stdout == data


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -9 $$", 137), ("kill -15 $$", 143), ("true", 0)])
def test_the_exit_code_is_the_command_s(proxmox, script, code):
    assert proxmox.pct("exec", "200", "--", "sh", "-c", script).returncode == code


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [("/opt/none/python", 127, "No such file or directory"), ("/etc/hosts", 126, "Permission denied")],
)
def test_a_command_that_cannot_be_run(proxmox, command, code, reason):
    done = proxmox.pct("exec", "201", "--", command, "-I")
    assert done.returncode == code
    assert done.stderr.startswith("lxc-attach: 201: ../src/lxc/attach.c: ")
    assert done.stderr.endswith(f'{reason} - Failed to exec "{command}"\n')


def test_the_environment_of_ssh_leaks_in_and_path_lacks_usr_local(proxmox):
    done = proxmox.ssh("SSL_CERT_FILE=/host/only exec /usr/sbin/pct exec 200 -- env")
    inside = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert inside["SSL_CERT_FILE"] == "/host/only"
    assert inside["PATH"] == "/sbin:/bin:/usr/sbin:/usr/bin"
    assert inside["HOME"] == "/root"
    assert "LC_CTYPE" not in inside
    through_sudo = proxmox.ssh("sudo -n /usr/sbin/pct exec 200 -- env", "ops").stdout
    assert "SUDO_USER=ops" in through_sudo


def test_the_working_directory_is_the_host_s_where_it_exists(proxmox):
    assert proxmox.ssh("cd /usr/lib; /usr/sbin/pct exec 200 -- /usr/bin/pwd").stdout == "/usr/lib\n"
    assert proxmox.ssh(f"cd {proxmox.state}; /usr/sbin/pct exec 200 -- /usr/bin/pwd").stdout == "/\n"


def test_what_was_attached_has_no_parent_inside(proxmox):
    script = "import os; print(os.getppid(), os.getpid() > 1)"
    assert proxmox.pct("exec", "200", "--", "/usr/bin/python3", "-c", script).stdout == "0 True\n"


def test_a_killed_ssh_leaves_the_inside_running(proxmox):
    argv = ["ssh", "-F", str(proxmox.ssh_config()), "10.1.2.6"]
    script = "/usr/sbin/pct exec 200 -- sh -c 'echo $$; exec sleep 20'"
    ssh = subprocess.Popen([*argv, script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    pid = ssh.stdout.readline().strip()
    ssh.kill()
    ssh.communicate()
    wait_for(lambda: not proxmox.sshd.sessions())
    assert proxmox["200"].run("cat", f"/proc/{pid}/comm").stdout == "sleep\n"


def test_ssh_returns_when_every_holder_of_its_streams_is_gone(proxmox):
    before = time.monotonic()
    held = proxmox.ssh("/usr/sbin/pct exec 200 -- sh -c 'sleep 1.5 & echo out'")
    assert (held.stdout, time.monotonic() - before > 1.4) == ("out\n", True)
    free = proxmox.ssh("/usr/sbin/pct exec 200 -- sh -c 'sleep 20 </dev/null >/dev/null 2>&1 & echo out'")
    assert free.stdout == "out\n"


def test_a_noisy_login_comes_before_the_answer(proxmox):
    bashrc = proxmox.state / "home" / "root" / ".bashrc"
    bashrc.write_text("echo welcome\n")
    try:
        assert proxmox.ssh("/usr/sbin/pct status 200").stdout == "welcome\nstatus: running\n"
    finally:
        bashrc.unlink()


@pytest.mark.parametrize("ct", ["200", "201"])
def test_a_stop_kills_at_once_and_a_start_is_another_boot(proxmox, ct):
    container = proxmox[ct]
    container.run("sh", "-c", "echo model >/dev/shm/model; echo kept >/workspace/kept")
    script = "trap 'echo ended >/workspace/ended; exit' TERM; while :; do sleep 0.1; done"
    going = subprocess.Popen(
        [*proxmox.enter, "/usr/sbin/pct", "exec", ct, "--", "sh", "-c", f"echo ready; {script}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    going.stdout.readline()
    before = container.run("cat", "/proc/sys/kernel/random/boot_id").stdout
    assert proxmox.pct("stop", ct).returncode == 0
    assert going.wait(10) == 137
    going.stdout.close()
    assert proxmox.pct("start", ct).returncode == 0
    assert container.run("cat", "/proc/sys/kernel/random/boot_id").stdout != before
    assert container.run("ls", "-A", "/dev/shm").stdout == ""
    assert container.run("ls", "/workspace").stdout == "kept\n"
    assert int(container.run("sh", "-c", "echo $$").stdout) < 50


def test_a_shutdown_asks_first(proxmox):
    script = "trap 'echo ended >/workspace/ended; exit' TERM; echo ready; while :; do sleep 0.1; done"
    going = subprocess.Popen(
        [*proxmox.enter, "/usr/sbin/pct", "exec", "200", "--", "sh", "-c", script], stdout=subprocess.PIPE, text=True
    )
    going.stdout.readline()
    assert proxmox.pct("shutdown", "200").returncode == 0
    going.communicate(timeout=10)
    assert proxmox["200"].path("/workspace/ended").read_text() == "ended\n"
    assert proxmox.pct("status", "200").stdout == "status: stopped\n"


def test_a_frozen_container_says_running_and_answers_nothing(proxmox):
    container = proxmox["200"]
    container.freeze()
    assert proxmox.pct("status", "200").stdout == "status: running\n"
    going = subprocess.Popen([*proxmox.enter, "/usr/sbin/pct", "exec", "200", "--", "true"], stdin=subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        going.wait(0.7)
    container.thaw()
    assert going.wait(10) == 0
    container.freeze()
    proxmox.reset()
    assert container.run("true").returncode == 0


def test_orphans_are_reaped(proxmox):
    container = proxmox["200"]
    container.run("sh", "-c", "(sleep 0.1 & sleep 0.1 &) & exit 0")
    names = "cat /proc/[0-9]*/comm 2>/dev/null; true"
    wait_for(lambda: "sleep" not in container.run("sh", "-c", names).stdout)


def test_push_and_pull_copy(proxmox):
    source = proxmox.state / "pushed"
    source.write_bytes(b"\0content\xff")
    assert proxmox.pct("push", "201", str(source), "/root/it", "--perms", "0600").returncode == 0
    assert proxmox["201"].run("stat", "-c", "%a %U", "/root/it").stdout == "600 root\n"
    assert proxmox.pct("pull", "201", "/root/it", f"{source}.back").returncode == 0
    assert (proxmox.state / "pushed.back").read_bytes() == b"\0content\xff"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("/etc/hostname", "/none/x"), "failed to create file: /none/x: No such file or directory"),
        (("/etc/hostname", "/root"), "failed to create file: /root: Is a directory"),
        (("/etc/hostname", "/usr/x"), "failed to create file: /usr/x: Read-only file system"),
        (("/etc/hostname", "/root/busy"), "failed to create file: /root/busy: Text file busy"),
        (("/none", "/root/x"), "failed to open /none for reading: No such file or directory"),
        (("/etc/hostname", "/root/x", "--perms", "rw"), "invalid mode: 'rw'"),
        (("/etc/hostname", "/root/x", "--user", "nosuch"), "failed to get uid for: nosuch"),
        (("/etc/hostname", "/root/x", "--user", "70000"), "failed to change file owner: Invalid argument"),
    ],
)
def test_a_failed_push_exits_with_0(proxmox, arguments, said):
    # 201: in a user namespace there is no id 70000.
    proxmox["201"].run("sh", "-c", "cp /usr/bin/sleep /root/busy; /root/busy 20 </dev/null >/dev/null 2>&1 &")
    done = proxmox.pct("push", "201", *arguments)
    assert (done.stderr, done.returncode) == (f"{said}\n", 0)


def test_a_failed_pull_exits_with_0(proxmox):
    done = proxmox.pct("pull", "200", "/none", "/root/x")
    assert (done.stderr, done.returncode) == ("failed to open /none for reading: No such file or directory\n", 0)
    done = proxmox.pct("pull", "200", "/etc/hostname", "/none/x")
    assert (done.stderr, done.returncode) == ("failed to create file: /none/x: No such file or directory\n", 0)


def test_a_push_onto_a_full_disk_is_short_and_says_nothing(proxmox):
    source = proxmox.state / "large"
    source.write_bytes(bytes(6 << 20))
    done = proxmox.pct("push", "200", str(source), "/mnt/small/large")
    assert (done.stderr, done.returncode) == ("", 0)
    assert int(proxmox["200"].run("stat", "-c", "%s", "/mnt/small/large").stdout) <= 4 << 20


def test_a_push_is_in_place_follows_links_and_makes_an_empty_file_of_a_directory(proxmox):
    container = proxmox["200"]
    container.run("sh", "-c", "echo old >/root/real; chmod 751 /root/real; ln -s /root/real /root/link")
    inode = container.run("stat", "-c", "%i", "/root/real").stdout
    proxmox.pct("push", "200", "/etc/hostname", "/root/link", "--perms", "0600")
    assert container.run("stat", "-c", "%i", "/root/real").stdout == inode
    assert container.run("stat", "-c", "%a", "/root/real").stdout == "751\n"
    assert proxmox.pct("push", "200", "/etc", "/root/folder").returncode == 0
    assert container.run("stat", "-c", "%s %F", "/root/folder").stdout == "0 regular empty file\n"


def test_the_knobs_of_push(proxmox):
    source = proxmox.state / "pushed"
    source.write_bytes(b"x" * 1000)
    with proxmox.knobs(push="No space left on device"):
        done = proxmox.pct("push", "200", str(source), "/root/it")
    assert (done.stderr, done.returncode) == ("failed to create file: /root/it: No space left on device\n", 0)
    assert not proxmox["200"].path("/root/it").exists()
    with proxmox.knobs(push="short"):
        assert proxmox.pct("push", "200", str(source), "/root/it").stderr == ""
    assert proxmox["200"].path("/root/it").stat().st_size == 500


def test_a_push_holds_the_lock_that_others_wait_for(proxmox):
    proxmox.set_knobs(push_seconds=0.8)
    argv = [*proxmox.enter, "/usr/sbin/pct", "push", "200", "/etc/hostname", "/root/x"]
    pushing = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    wait_for(proxmox.calls)
    time.sleep(0.3)
    proxmox.set_knobs(lock_timeout=0.1)
    late = proxmox.pct("stop", "200")
    assert late.stderr == (
        "trying to acquire lock...\ncan't lock file '/run/lock/lxc/pve-config-200.lock' - got timeout\n"
    )
    assert late.returncode != 0
    assert proxmox.pct("exec", "200", "--", "true").returncode == 0
    proxmox.set_knobs()
    assert proxmox.pct("stop", "200").stderr == "trying to acquire lock...\n OK\n"
    assert pushing.wait(10) == 0


def test_a_delay_is_what_every_call_costs(proxmox):
    with proxmox.knobs(delay=0.6):
        before = time.monotonic()
        proxmox.pct("status", "200")
        assert time.monotonic() - before >= 0.6


def test_a_killed_pct_leaves_the_inside_running(proxmox):
    argv = [*proxmox.enter, "/usr/sbin/pct", "exec", "200", "--", "sh", "-c", "echo $$; exec sleep 20"]
    going = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    pid = going.stdout.readline().strip()
    # nsenter's child is the pct, which became lxc-attach.
    with open(f"/proc/{going.pid}/task/{going.pid}/children") as children:
        os.kill(int(children.read().split()[0]), signal.SIGKILL)
    going.wait(10)
    going.stdout.close()
    assert proxmox["200"].run("cat", f"/proc/{pid}/comm").stdout == "sleep\n"
