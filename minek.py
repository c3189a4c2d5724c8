import fa3verify
from tests.quality.outside.plain import attend
@fa3verify.kernel(dtypes=("fp16",), library="numpy", layout="bshd", features=("causal","gqa"))
def mine(q,k,v,**o): return attend(q,k,v,**o)
