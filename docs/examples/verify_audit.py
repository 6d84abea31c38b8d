"""Verifies an audit trail without walstream (docs/audit.md): python verify_audit.py DIRECTORY [PUBLIC_KEY]"""

import json
import re
import sys
from hashlib import sha256
from pathlib import Path

import zstandard
from cryptography.hazmat.primitives.serialization import load_pem_public_key

MARKS = (b'},"payload":', b'},"payload_text":', b'},"erased":')
HEAD = re.compile(r'\{"head":(\{[^{}]*\}),"signature":(?:"(\w+)"|null)\}')

directory = Path(sys.argv[1] if len(sys.argv) > 1 else sys.exit(__doc__))
prev, n, offset, hashes = "0" * 64, 0, None, {}
files = {path.name.removesuffix(".zst"): path for path in sorted(directory.glob("[0-9]*.jsonl*"))}
for name in sorted(files):
    data = files[name].read_bytes()
    if files[name].suffix == ".zst":
        data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    for line in data.split(b"\n")[:-1]:
        end = min(at for at in map(line.find, MARKS) if at > 0) + 1
        own, header, (part, value) = line[9:73].decode(), line[84:end], line[end + 1 : -1].split(b":", 1)
        fields, n = json.loads(header), n + 1
        payload = json.loads(value).encode() if part == b'"payload_text"' else value
        assert sha256(header).hexdigest() == own, f"{name}: the header of record {n} was changed"
        assert (fields["prev"], fields["n"]) == (prev, n), f"{name}: record {n} does not follow"
        assert part == b'"erased"' or sha256(payload).hexdigest() == fields["sha256"], f"{name}: payload of record {n}"
        assert None in (fields.get("offset"), offset) or fields["offset"] == offset + 1, f"{name}: a hole before {n}"
        prev, offset, hashes[n] = own, fields.get("offset", offset), own
heads = directory / "heads.jsonl"
for body, signature in HEAD.findall(heads.read_text() if heads.exists() else ""):
    head = json.loads(body)
    assert (head["chain"], head["hash"]) == (hashes[1], hashes.get(head["n"])), f"head {head['n']} is of another chain"
    if len(sys.argv) > 2:  # raises if somebody else signed
        load_pem_public_key(Path(sys.argv[2]).read_bytes()).verify(bytes.fromhex(signature), body.encode())
vouched = "the heads vouch" if heads.exists() else "no head vouches"
print(f"{n} records up to offset {offset} follow from one another, and {vouched} for them")
