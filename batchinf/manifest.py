"""stopgap"""
import json, time, os
from dataclasses import dataclass, asdict, field
from typing import Any, NamedTuple
import numpy as np
from batchinf import faults
from batchinf.records import Part
from batchinf.shards import Extent, total_shards
FORMAT_VERSION = 1

@dataclass(frozen=True)
class Header:
    format_version: int; job_id: str; created_at: str; identity: dict[str, Any]; fingerprint: str; layout: dict[str, Any]; spec: dict[str, Any]

class ProcessGroup(NamedTuple):
    incarnation: str; host: str; boot_id: str; pgid: int; pid_start_time: int

class State:
    def __init__(self):
        self.header=None; self.extents=[]; self.parts={}; self.is_done=False; self.last_epoch=0; self.device_s=0.0; self.groups={}
    @property
    def committed(self):
        b=np.zeros(total_shards(self.extents),bool)
        for k in self.parts: b[k]=True
        return b
    def forget(self, s): self.parts.pop(s)
    def note(self, part): self.parts[part.shard]=part
    @property
    def process_groups(self): return list(self.groups.values())
    @property
    def num_rows(self): return sum(p.num_rows for p in self.parts.values())
    @property
    def num_errors(self): return sum(p.num_errors for p in self.parts.values())
    @property
    def num_bytes(self): return sum(p.num_bytes for p in self.parts.values())
    @property
    def num_prompt_tokens(self): return sum(p.num_prompt_tokens for p in self.parts.values())
    @property
    def num_output_tokens(self): return sum(p.num_output_tokens for p in self.parts.values())

def read_state(folder):
    s=State()
    for n in folder.list("manifest"):
        s.last_epoch=int(n[:6])
        for line in folder.read("manifest/"+n).splitlines():
            try: d=json.loads(line)
            except ValueError: continue
            k=d.pop("kind"); t=d.pop("time",0)
            if k=="header": s.header=Header(**d)
            elif k=="extent": d.pop("source"); s.extents.append(Extent(**d))
            elif k=="part": s.parts[d["shard"]]=Part(**d)
            elif k=="done": s.is_done=True
            elif k=="event":
                if d["name"]=="replica_started": s.groups[d["incarnation"]]=ProcessGroup(d["incarnation"],d["host"],d["boot_id"],d["pgid"],d["pid_start_time"])
                if d["name"]=="replica_ended": s.groups.pop(d["incarnation"],None); s.device_s+=d["device_s"]
    return s if s.header else None

class Manifest:
    def __init__(self, folder, epoch, lock):
        self.lock=lock; self.f=open(folder.path(f"manifest/{epoch:06d}.jsonl"),"xb",buffering=0); self.buf=[]
    def _l(self, **d): self.buf.append(json.dumps({**d,"time":time.time()}).encode()+b"\n")
    def header(self,h): self._l(kind="header",**asdict(h))
    def extent(self,e,source): self._l(kind="extent",source=source,**asdict(e))
    def part(self,p): self._l(kind="part",**asdict(p))
    def event(self,name,**f): self._l(kind="event",name=name,**f)
    def done(self,**f): self._l(kind="done",**f)
    def commit(self):
        if self.lock: self.lock.check()
        if not self.buf: return
        data=b"".join(self.buf); self.buf=[]
        h=len(data)//2
        self.f.write(data[:h]); faults.point("manifest.mid_line"); self.f.write(data[h:]); os.fsync(self.f.fileno())
    def close(self): self.f.close()
