// libatb.so as far as torch_npu's plug-in needs it to load: every operation stops by name. plugin.py has those that are
// simulated, in front of the plug-in's.
#include "stops.h"

#define OPERATION(MANGLED, NAME) STOPS(_ZN3atb15CreateOperationINS_5infer##MANGLED##EEEiRKT_PPNS_9OperationE, "ATB's " NAME)

STOPS(_ZN3atb13CreateContextEPPNS_7ContextE, "ATB's context")
STOPS(_ZN3atb14DestroyContextEPNS_7ContextE, "ATB's context")
STOPS(_ZN3atb16DestroyOperationEPNS_9OperationE, "ATB's operation")
STOPS(_ZN3atb5Utils13GetTensorSizeERKNS_6TensorE, "ATB's tensor")
OPERATION(11LinearParam, "linear layer")
OPERATION(12ElewiseParam, "elementwise operation")
OPERATION(12RmsNormParam, "RMS norm")
OPERATION(14GroupTopkParam, "top-k of groups")
OPERATION(18SelfAttentionParam, "self-attention")
OPERATION(19PagedAttentionParam, "paged attention")
OPERATION(20ReshapeAndCacheParam, "reshape and cache")
OPERATION(9RopeParam, "rotary embedding")
