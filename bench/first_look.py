import sys, time, torch
import lamina
from lamina.bench.shapes import SHAPES
from lamina.bench.random_model import random_model
from lamina.bench.bytes import decode_bytes
from lamina.bench.measure import limits
from lamina.bench.subjects import Lamina
dev=torch.device("cuda")
lim=limits(dev, torch.bfloat16); print(lim, flush=True)
def look(name, rows_list=(1,), contexts=(128,), n=64, profile=False):
    t=time.time(); m=random_model(SHAPES[name].config, torch.bfloat16, dev); torch.cuda.synchronize(); print(name, "made in", time.time()-t, m.explain(), flush=True)
    s=Lamina(m)
    for rows in rows_list:
        for ctx in contexts:
            try:
                s.open(rows, ctx, n*8+8)
                t=time.time(); s.run(4); torch.cuda.synchronize(); first=time.time()-t
                best=1e9
                for _ in range(3):
                    s.restart(); s.run(2); torch.cuda.synchronize()
                    a,b=torch.cuda.Event(True),torch.cuda.Event(True); a.record(); s.run(n); b.record(); b.synchronize(); best=min(best,a.elapsed_time(b)/n)
                moved=decode_bytes(m, rows, ctx); total=getattr(moved,'total',None) or sum(v for v in vars(moved).values() if isinstance(v,(int,float)))
                limit=total/lim.read*1e3
                print(f"{name} rows {rows} ctx {ctx}: {best:.3f} ms/step, limit {limit:.3f} ms, share {limit/best*100:.1f}%  first {first:.1f}s", flush=True)
                if profile and rows==1:
                    from torch.profiler import profile as P, ProfilerActivity
                    with P(activities=[ProfilerActivity.CUDA]) as p: s.run(4); torch.cuda.synchronize()
                    print(p.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=60), flush=True)
            except Exception as e:
                import traceback; traceback.print_exc()
            finally: s.close()
    del s, m; torch.cuda.empty_cache()
P="profile" in sys.argv
for w in sys.argv[1:]:
    if w=="profile": continue
    name,*rest=w.split(":")
    rows=tuple(map(int,rest[0].split(","))) if rest else (1,)
    ctx=tuple(map(int,rest[1].split(","))) if len(rest)>1 else (128,)
    look(name,rows,ctx,profile=P)
