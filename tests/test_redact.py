"""Secrets in commands and settings of external programs are redacted; all other values are unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dlscale.core import redact, urls
from dlscale.core.errors import UserError

S = "s3cr3t-Value"

SECRETS: dict[str, Any] = {
    "option": ["--token", S],
    "option with =": [f"--token={S}"],
    "one dash": ["-api_key", S],
    "its name has words": ["--hf-token", S],
    "its name has capitals": [f"--accessToken={S}"],
    "its name has dots": [f"logger.wandb.api_key={S}"],
    "variable": ["env", f"API_KEY={S}", "python"],
    "variable of a word": [f"--env=WANDB_API_KEY={S}"],
    "spaces": [f"--password={S} {S}"],
    "header": ["-H", f"Authorization: Bearer {S}"],
    "header of a word": [f"--header=X-Api-Key: {S}"],
    "scheme": ["-H", f"bearer {S}"],
    "login": ["curl", "-u", f"me:{S}"],
    "address": [f"https://me:{S}@h.org/x"],
    "address with a token": [f"--data=https://{S}@h.org/x"],
    "database": [f"postgresql://me:{S}@h.org:5432/runs"],
    "malformed address": [f"https://me:a/{S}@h.org/x"],
    "signed address": [f"https://h.org/x?a=1&X-Amz-Signature={S}&X-Amz-Credential={S}%2F1"],
    "sas": [f"https://h.org/x?sv=2024-01-01&sig={S}"],
    "access_token": [f"https://h.org/x?access_token={S}&split=train"],
    "shell": ["sh", "-c", f"HF_TOKEN={S} python train.py --password '{S}' --lr 1"],
    "JSON": ["--logger", f'{{"api_key": "{S} {S}", "entity": "me"}}'],
    "JSON in a shell": ["sh", "-c", f'train --logger "{{\\"api_key\\": \\"{S}\\"}}"'],
    "JSON with a list": [f'{{"password": ["{S}", "{S}2"], "entity": "me"}}'],
    "JSON with lists": [f'{{"secrets": {{"hf": ["{S}"], "wandb": "{S}2"}} }}'],
    "YAML": [f"api_key: {S}", f"lr: 1\ntoken:\n  {S}"],
    "os.environ": ["python", "-c", f"import os; os.environ['HF_TOKEN'] = '{S}'; import train"],
    "os.environ.setdefault": ["python", "-c", f"os.environ.setdefault('HF_TOKEN', '{S}')"],
    "os.environ.get": ["python", "-c", f"token = os.environ.get('HF_TOKEN', '{S}')"],
    "os.environ or": ["python", "-c", f"x = os.getenv('HF_TOKEN') or '{S}'"],
    "bytes": ["python", "-c", f"d = {{'HF_TOKEN': b'{S}'}}"],
    "bytes argument": ["python", "-c", f"setdefault(b'HF_TOKEN', b'{S}')"],
    "raw string": ["python", "-c", f"d = {{'HF_TOKEN':r'{S}'}}"],
    "long string": ["python", "-c", f'x = 1; token = """{S}\n"{S}" """'],
    "long string with a prefix": ["python", "-c", f"login(token = f'''{S}''')"],
    "escaped quote": ["python", "-c", f'x = 1; token = "a\\" {S}"'],
    "strings": ["python", "-c", f"login(token='a' + '{S}')"],
    "argument of a call": ["python", "-c", f"login(token=str('a', '{S}'))"],
    "annotation": ["python", "-c", f"import a; token: str = '{S}'", f"x; token: str | None = '{S}'"],
    "key": ["python", "-c", f"import a; token['hf'] = '{S}'; f().password = '{S}'"],
    "comparison": ["python", "-c", f"assert token == '{S}'; assert 'b' != password != '{S}'"],
    "list": ["python", "-c", f"main(['--token', '{S}'])"],
    "word of two strings": ["sh", "-c", f"export HF_TOKEN=a'{S}' && HF_TOKEN=\\{S} python"],
    "escaped space": ["sh", "-c", f"export HF_TOKEN=a\\ {S}; python"],
    "dollar string": ["sh", "-c", f"export HF_TOKEN=$'{S}'"],
    "appended": ["sh", "-c", f"export HF_TOKEN+={S}"],
    "default of a variable": ["sh", "-c", f"python --n ${{HF_TOKEN:-{S}}}"],
    "here string": ["sh", "-c", f"read -r HF_TOKEN <<< {S}; setenv HF_TOKEN {S}; python"],
    "continued line": ["sh", "-c", f"python train.py --token \\\n  {S}"],
    "option in a shell": ["sh", "-c", f"python train.py --password -{S} --lr 1"],
    "variable in quotes": ["sh", "-c", f"docker run -e 'PASSWORD=a {S}' image"],
    "value after a dash": ["--password", f"-{S}", "--api-key", f"-x{S}"],
    "system property": ["java", f"-Dtoken={S}", f"-Dspark.keyStorePassword={S}", "-storepass", S],
    "suffix of a name": ["--secret-key-base", S, f"TOKEN_VALUE={S}", f"TOKEN[0]={S}", f"--dbpassword={S}"],
    "letters": [f"\uff28\uff26_TOKEN={S}"],
    "login with =": [f"--user=me:{S}", f"--proxy-user=me:{S}"],
    "login without a space": [f"-ume:{S}"],
    "login in a shell": ["sh", "-c", f"curl -u me:{S} h.org; curl --user 'me:{S}' h.org"],
    "cookies": ["-H", f"Cookie: a={S}; b={S}2"],
    "cookies of a word": [f"--header=Cookie: a={S}; b={S}2"],
    "cookies in a shell": ["sh", "-c", f"curl -H 'Cookie: a={S}; b={S}2' -H \"X-Api-Key: a {S}\" h.org"],
    "digest": ["sh", "-c", f'curl -H \'Authorization: Digest username="me", response="{S}"\' h.org'],
    "private key": [f"-----BEGIN RSA PRIVATE KEY-----\n{S.replace('-', '')}\n", "--token", S],
    "WANDB_API_KEY": {"WANDB_API_KEY": S},
    "HF_TOKEN": {"HF_TOKEN": S},
    "AWS": {"AWS_SECRET_ACCESS_KEY": S, "AWS_ACCESS_KEY_ID": S, "AWS_SESSION_TOKEN": S},
    "PGPASSWORD": {"PGPASSWORD": S, "DB_PASS": S, "MYSQL_PWD": S},
    "OPENAI_KEY": {"OPENAI_KEY": S, "GITHUB_PAT": S},
    "DATABASE_URL": {"DATABASE_URL": f"mysql://me:{S}@h.org/runs"},
    "value": {"values": {"password": S, "tokens": 5}},
    "several": {"values": {"api_key": [S, f"{S}2"]}},
}

OPEN: tuple[Any, ...] = (
    ["--max-tokens", "4096"],
    ["--num-tokens=4096", "--tokens", "train,valid"],
    ["--token", "12.5e3"],
    ["--tokenizer", "bert-base"],
    ["--tokenizer-path=/data/t.json"],
    ["--token_type", "bpe"],
    ["--pad-token", "<pad>", "--eos_token", "END", "--mask-token", "[MASK]"],
    ["--class-token=mean", "model.cls_token=first"],
    ["--key-dim", "value"],
    ["--key", "image", "--label-key", "y", "--sort-key=loss"],
    ["--monkey", "see", "turkey=1", "--hotkeys", "a"],
    ["--password-file", "/home/me/.pw", "--secret-path=/run/x"],
    ["--use-auth-token", "true"],
    ["--forward-pass", "fused", "--compass=north", "--bypass", "x"],
    ["--secretary", "x", "--author", "me", "--signal", "TERM"],
    ["--token", "--epochs", "3"],
    ["--password=$PASSWORD", "--token", "${HF_TOKEN}"],
    ["python", "-u", "train.py", "pwd=/here"],
    ["https://h.org/x?split=train&tokenizer=bert&max_tokens=5", "git+https://h.org/x@v1"],
    ["scp", "me@h.org:/x", "s3://bucket/key", "file:///data/x"],
    ["sh", "-c", "python train.py --tokenizer bert; echo key: value"],
    {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "0", "PWD": "/here"},
    {"MAX_TOKENS": "4096", "PRIMARY_KEY": "name", "KEY_DIM": "x", "AUTHOR": "me"},
    {"values": {"token": 4096, "key_dim": "wide", "monkey": "see"}},
    ["--sig", "gauss", "--signature", "serving_default"],
    ["--user", "alice", "--user=alice", "-ualice", "-u", "1000:1000", "rsync", "-u", "host:/x"],
    ["--use-auth-token", "-l", "3", "--auth", "--lr=1", "--token", "-lr=3"],
    ["sh", "-c", "python train.py --token --lr 3 --auth -n 3 && echo 'x'"],
    ["sh", "-c", "for token in a b; do echo 'x'; done; echo token | cat 'x'"],
    ["python", "-c", "import os; os.environ['HF_TOKEN']; print('x')"],
    ["python", "-c", "login(token=os.environ['HF_TOKEN'])", "login(token=os.getenv('HF_TOKEN'))"],
    ["python", "-c", "x.pad_token = x.eos_token; key = 'a'; print(tokens, 'x'); f(token=5, password=None)"],
    ["python", "-c", "print(token)", "d = {'token': 5, 'max_token': 1e5, 'key': 'x', 'sort_key': 'y', 'monkey': 'z'}"],
    ["--subtoken=mean", "--basekey=x", "--value", "x", "--string", "y"],
)


@pytest.mark.parametrize("kind", SECRETS)
def test_secrets_are_redacted_and_restored(kind: str) -> None:
    given, secrets = SECRETS[kind], dict[str, str]()
    found = redact.redact(given, secrets)
    assert S not in str(found) and "***" in str(found)
    assert redact.put_back(found, secrets) == given
    assert redact.redact(found) == found
    assert not urls.has_secret(found)


@pytest.mark.parametrize("given", OPEN)
def test_harmless_words_are_not_redacted(given: Any) -> None:
    assert redact.redact(given) == given
    assert not urls.has_secret(given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a; os.environ['HF_TOKEN'] = 'S'; b", "a; os.environ['HF_TOKEN'] = '***secret.HF_TOKEN***'; b"),
        ('{"token": "S", "n": "m"}', '{"token": "***secret.token***", "n": "m"}'),
        ("f(token=b'S', n='m')", "f(token=b'***secret.token***', n='m')"),
        ("t --token S --lr 1", "t --token ***secret.token*** --lr 1"),
        ("export A_TOKEN=S; b=1 python", "export A_TOKEN=***secret.A_TOKEN***; b=1 python"),
        ("bash -c 't --token S' && a 'b'", "bash -c 't --token ***secret.token***' && a 'b'"),
        ("A_TOKEN=S t --lr {a} S", "A_TOKEN=***secret.A_TOKEN***{a}***secret.A_TOKEN.2***"),
        ("t --token=S{a}/{b} 'c'", "t --token=***secret.token***{a}/{b} 'c'"),
        ("Cookie: a=S; b=S", "Cookie: ***secret.Cookie***"),
        ("-ume:S", "-u***secret.login***"),
        ("a token. 'S'", "a token. '***secret.token***'"),
        ("curl -u 'a=b:S' h", "curl -u '***secret.login***' h"),
    ],
)
def test_the_text_around_a_secret_is_unchanged(given: str, expected: str) -> None:
    assert redact.redact([given]) == [expected]


@pytest.mark.parametrize("begin", ["", "x token: '", "x token=$("])
def test_long_texts_are_redacted_in_linear_time(begin: str) -> None:
    """With quadratic time, this test would take hours."""
    parts = ["a", "a-", "a=", "token=", "token,", "'token ", "\\", "--token ", "sk-", "a://", "-u a:", "***secret."]
    for part in parts:
        text = begin + part * (100_000 // len(part))
        assert redact.put_back(redact.redact(text, secrets := {}), secrets) == text


def test_secrets_are_recognised_by_form() -> None:
    forms = ["ghp_" + "a1" * 18, "hf_" + "aB3" * 11, "sk-proj-" + "aB3" * 9, "AKIA" + "A1" * 8, "glpat-" + "a1" * 10]
    forms += ["npm_" + "aB3" * 12, "r8_" + "aB3" * 12, "pypi-AgEI" + "aB3-" * 12, "dckr_pat_" + "aB3" * 9]
    forms += ["dapi" + "0a" * 16, "ya29." + "aB3" * 9, "SG." + "aB3" * 7 + "." + "aB3" * 14]
    for form in forms:
        assert redact.redact(["login", form]) == ["login", "***secret.token***"]
    assert redact.redact(["task-" + "a1" * 12, "hf_model", "sk-learn-experiment-2024-run"])[0].startswith("task")


def test_a_marker_has_the_secrets_name_and_a_number_where_two_differ() -> None:
    secrets = dict[str, str]()
    given = {"plans": {"p": {"runs": {name: {"program": {"environment": {"HF_TOKEN": name * 9}}} for name in "aba"}}}}
    found = redact.redact_programs(given, secrets)["plans"]["p"]["runs"]
    tokens = [found[name]["program"]["environment"]["HF_TOKEN"] for name in "ab"]
    assert tokens == ["***secret.HF_TOKEN***", "***secret.HF_TOKEN.2***"]
    assert secrets == {"***secret.HF_TOKEN***": "a" * 9, "***secret.HF_TOKEN.2***": "b" * 9}


def test_values_inserted_into_secret_options_are_redacted() -> None:
    given = {
        "settings": {
            "program": {"command": ["t", "--token", "{tok}", "--n={n}"], "environment": {"API_KEY": "{inner}"}}
        },
        "runs": {"a": {"program": {"values": {"tok": S, "n": "many", "inner": "{deep}", "deep": f"{S}2"}}}},
        "sweep": {"values": {"program.values.tok": [S, f"{S}3"]}},
        "key": {"token": S},  # this key is not part of a program
    }
    found = redact.redact_programs(given, secrets := {})
    assert found["key"] == given["key"] and found["settings"] == given["settings"]
    assert found["runs"]["a"]["program"]["values"] == {
        **{"tok": "***secret.tok***", "n": "many", "inner": "{deep}", "deep": "***secret.deep***"},
    }
    assert found["sweep"]["values"] == {"program.values.tok": ["***secret.tok***", "***secret.tok.2***"]}
    assert redact.put_back(found, secrets) == given


def test_patterns_of_a_program_are_no_secrets() -> None:
    given = {"program": {"rate": r"token=(\S+)", "losses": {r"token: (\S+)": "loss/valid"}}}
    assert redact.redact_programs(given) == given


def test_a_missing_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(urls.VARIABLE, raising=False)
    with pytest.raises(UserError, match="stands for a secret, which this process does not have"):
        redact.put_back(["--token=***secret.token***"], {})


def test_no_possessive_quantifier_of_a_group() -> None:
    """Before Python 3.11.5, such quantifiers match wrongly (gh-106052)."""
    source = Path(redact.__file__).read_text(encoding="utf-8")
    assert not re.search(r"\)[*+?]\+", source)
