import io.ncclffm.core.*;
import io.ncclffm.device.*;
import io.ncclffm.lsa.*;
